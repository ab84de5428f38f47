"""Products whose input rows come from, or whose output rows go to, other ranks, while the product is computed.

Each of the W ranks of the tensor-parallel group has an equal part of the rows, in the order of the ranks. Inputs are matrices, of
rows and features, and ``factor`` is (features, output features). Nothing here is known to autograd.

[Note: order of the pieces] A rank begins with what needs nobody: it multiplies its own rows while those of the others
arrive, and computes the rows of the others first, so that they travel while it computes its own. In step s it receives from
rank r - s and sends to rank r + s, so that in each step every rank sends and receives as much as every other. A piece is
the rows of one rank, or one of ``chunks`` parts of them.

[Note: memory] Everything is allocated where the computation is queued, before the lane is told to start after it, and
kept by :class:`UnderWay` until the computation has waited for the lane, also when an exception passes: see
[Note: buffer lifetime] in bmt_core.run.lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from bmt_core.run.lanes import Mark
from bmt_tp.tensor_group import TensorRanks, tensor_ranks

MIN_ROWS = 2048
"""Rows of the smallest piece on CUDA. A product of fewer rows does not keep the device busy, and costs more than it hides."""


class Piece(NamedTuple):
    """One exchange: which rows go to which rank, and which rows come from which; ``part`` None is all rows of a rank."""

    to: int
    source: int
    part: slice | None


class UnderWay:
    """What the lane has been given, in order, with the memory that it reads and writes: see [Note: memory]."""

    def __init__(self) -> None:
        self._marks: list[tuple[Mark, tuple[torch.Tensor, ...]]] = []

    def add(self, mark: Mark, *memory: torch.Tensor) -> None:
        """Keep ``memory`` until somebody has waited for ``mark``."""
        self._marks.append((mark, memory))

    def wait_for_next(self) -> None:
        """Wait for the first that nobody has waited for."""
        self._marks[0][0].wait()
        del self._marks[0]

    def wait(self) -> None:
        """Wait for the rest."""
        while self._marks:
            self.wait_for_next()

    def __del__(self) -> None:
        # On the CPU memory belongs to no stream, and the peer of a rank that failed may never come.
        if self._marks and self._marks[0][1][0].is_cuda:
            self.wait()


class GatheredRows:
    """The rows of all ranks; ``rows`` are this rank's. They start to travel when the object is made. Collective.

    Volume: each rank receives (W - 1) * rows.
    """

    def __init__(self, rows: torch.Tensor, chunks: int | None = 1) -> None:
        ranks = tensor_ranks()
        self._rank = ranks.rank
        self._own = rows.contiguous()
        self._all = rows.new_empty((ranks.size, *rows.shape))
        self._of_ranks = self._all.unbind()
        ranks.lane.after(ranks.lane.here())
        self._pieces = _pieces(ranks, rows, chunks)
        self._under_way = UnderWay()
        for to, source, part in self._pieces:
            incoming = _part(self._of_ranks[source], part)
            start = functools.partial(ranks.in_lane.exchange, [(_part(self._own, part), to)], [(incoming, source)])
            self._under_way.add(ranks.lane.run(start), self._own, self._all)

    def wait(self) -> torch.Tensor:
        """Return the rows of all ranks, (W * rows, ...), when they are there."""
        self._under_way.wait()
        self._of_ranks[self._rank].copy_(self._own)
        return self._all.flatten(0, 1)

    def times(self, factor: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``rows factor + bias`` of all ranks' rows, (W, rows, out)."""
        output = self._own.new_empty((*self._all.shape[:2], factor.shape[1]))
        of_ranks = output.unbind()
        _product(self._own, factor, bias, of_ranks[self._rank])
        for _, source, part in self._pieces:
            self._under_way.wait_for_next()
            _product(_part(self._of_ranks[source], part), factor, bias, _part(of_ranks[source], part))
        return output


def summed_product(
    input: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, chunks: int | None
) -> Callable[[], torch.Tensor]:
    """Start ``input factor`` of (W * rows, in), whose sum over the ranks is scattered: each gets its (rows, out), plus ``bias``.

    Return a function that waits for the parts of the sum and adds them up, in float32, rounded once. Collective. Volume: each
    rank sends (W - 1) * rows.
    """
    ranks = tensor_ranks()
    inputs = input.chunk(ranks.size)
    shape = (ranks.size, inputs[0].shape[0], factor.shape[1])
    all_parts, all_sent = input.new_empty(shape), input.new_empty(shape)
    parts, sent = all_parts.unbind(), all_sent.unbind()
    under_way = UnderWay()
    for to, source, part in _pieces(ranks, inputs[0], chunks):
        outgoing = _part(sent[to], part)
        _product(_part(inputs[to], part), factor, None, outgoing)
        ranks.lane.after(ranks.lane.here())
        start = functools.partial(ranks.in_lane.exchange, [(outgoing, to)], [(_part(parts[source], part), source)])
        under_way.add(ranks.lane.run(start), all_sent, all_parts)
    _product(inputs[ranks.rank], factor, bias, parts[ranks.rank])

    def wait() -> torch.Tensor:
        under_way.wait()
        return parts[0] + parts[1] if len(parts) == 2 else all_parts.sum(0)

    return wait


def reduced_product(
    input: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, chunks: int | None
) -> Callable[[], torch.Tensor]:
    """Start ``input factor`` of (n, in), whose sum over the ranks every rank gets, (n, out), plus ``bias``.

    Return a function that waits for the sum, which the backend forms in the input's dtype.

    The rows are computed in ``chunks``, each of which is summed while the next is computed. Collective. Volume: an
    all-reduce of n * out.
    """
    ranks = tensor_ranks()
    output = input.new_empty((len(input), factor.shape[1]))
    under_way = UnderWay()
    for part in _parts(len(input), chunks, _min_rows(input)):
        summed = _part(output, part)
        _product(_part(input, part), factor, None, summed)
        ranks.lane.after(ranks.lane.here())
        under_way.add(ranks.lane.run(functools.partial(ranks.in_lane.all_reduce, summed)), output)

    def wait() -> torch.Tensor:
        under_way.wait()
        return output if bias is None else output.add_(bias)

    return wait


def _product(input: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(input, factor, out=out)
    else:
        torch.addmm(bias, input, factor, out=out)


def _part(rows: torch.Tensor, part: slice | None) -> torch.Tensor:
    return rows if part is None else rows[part]


def _pieces(ranks: TensorRanks, rows: torch.Tensor, chunks: int | None) -> tuple[Piece, ...]:
    """Return the exchanges of ``rows`` of each rank, in the order of the pieces: see the note on it."""
    return _pieces_of(ranks.rank, ranks.size, rows.shape[0], chunks, _min_rows(rows))


@functools.lru_cache(maxsize=4096)
def _pieces_of(rank: int, size: int, rows: int, chunks: int | None, least: int) -> tuple[Piece, ...]:
    steps = range(1, size)
    return tuple(
        Piece((rank + step) % size, (rank - step) % size, part)
        for step in steps
        for part in _parts(rows, chunks, least)
    )


def _min_rows(input: torch.Tensor) -> int:
    return MIN_ROWS if input.is_cuda else 1


def _parts(rows: int, chunks: int | None, least: int) -> list[slice | None]:
    """Cut ``rows`` into ``chunks`` parts of nearly equal size, but none of less than ``least``; None: as many as suit a GPU.

    >>> _parts(5, 2, 1), _parts(4096, None, 1), _parts(600, 2, 512), _parts(0, 2, 1)
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 2048, None), slice(2048, 4096, None)], [None], [])
    """
    count = max(1, min(rows // MIN_ROWS if chunks is None else chunks, rows // least))
    if count == 1:
        return [None] if rows else []
    step = -(-rows // count)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
