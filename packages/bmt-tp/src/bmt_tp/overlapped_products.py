"""Products whose input rows come from, or whose output rows go to, other ranks, while the product is computed.

``rows`` of a tensor are its first dim; each of the W ranks of a group has an equal part of them, in the order of the ranks.
Nothing here is known to autograd.

[Note: order of the pieces] A rank begins with what needs nobody: it multiplies its own rows while those of the others
arrive, and computes the rows of the others first, so that they travel while it computes its own. In step s it receives from
rank r - s and sends to rank r + s, so that in each step every rank sends and receives as much as every other. A piece is
the rows of one rank, or one of ``chunks`` parts of them.

[Note: memory] Everything is allocated where the computation is queued, before the lane is told to start after it, and
freed after the computation has waited for the lane: see [Note: buffer lifetime] in bmt_core.run.lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bmt_core.comm.protocols import Group, Work
from bmt_core.run.lanes import Lane, Mark

# Rows of one product below which a GPU is no longer busy with it: a piece that is cut further costs more than it hides.
_MIN_ROWS = 512


class GatheredRows:
    """The rows of all ranks, (W, rows, ...) in the order of the ranks, as they arrive in ``lane``. Collective.

    Volume: each rank receives (W - 1) * rows.
    """

    def __init__(self, rows: torch.Tensor, group: Group, lane: Lane, chunks: int | None = 1) -> None:
        self._own = group.rank
        self.data = torch.empty((group.size, *rows.shape), dtype=rows.dtype, device=rows.device)
        self.data[group.rank] = rows
        self.pieces = _pieces(group, len(rows), chunks)
        twin = lane.group(group)
        lane.after(lane.here())
        own = self.data[group.rank]
        self.arrivals: list[Mark] = [
            lane.run(_exchange(twin, own[part], to, self.data[source][part], source))
            for to, source, part in self.pieces
        ]

    def wait(self) -> torch.Tensor:
        """Return the rows of all ranks, (W * rows, ...), when they are there."""
        for arrival in self.arrivals:
            arrival.wait()
        self.arrivals = []
        return self.data.flatten(0, 1)

    def times(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``rows weightᵀ + bias`` of all ranks' rows, (W * rows, out), of two-dimensional rows."""
        size, rows, _ = self.data.shape
        output = torch.empty((size, rows, len(weight)), dtype=self.data.dtype, device=self.data.device)
        _product(self.data[self._own], weight, bias, output[self._own])
        for (_, source, part), arrival in zip(self.pieces, self.arrivals, strict=True):
            arrival.wait()
            _product(self.data[source][part], weight, bias, output[source][part])
        return output.flatten(0, 1)


class SummedRows:
    """For each rank, the sum over the ranks of what they compute for its rows, as it is computed and sent. Collective.

    ``compute(first, end, out)`` writes rows ``first`` to ``end`` of all W * rows into ``out``. The sum is formed in float32
    and rounded once. Volume: each rank sends (W - 1) * rows.
    """

    def __init__(
        self,
        compute: Callable[[int, int, torch.Tensor], None],
        like: torch.Tensor,
        shape: tuple[int, int],
        group: Group,
        lane: Lane,
        chunks: int | None = 1,
    ) -> None:
        total, width = shape
        rows = total // group.size
        self._parts = torch.empty((group.size, rows, width), dtype=like.dtype, device=like.device)
        self._sent = torch.empty((group.size - 1, rows, width), dtype=like.dtype, device=like.device)
        self._arrivals: list[Mark] = []
        twin = lane.group(group)
        for to, source, part in _pieces(group, rows, chunks):
            outgoing = self._sent[(to - group.rank) % group.size - 1][part]
            compute(to * rows + part.start, to * rows + part.stop, outgoing)
            lane.after(lane.here())
            self._arrivals.append(lane.run(_exchange(twin, outgoing, to, self._parts[source][part], source)))
        compute(group.rank * rows, (group.rank + 1) * rows, self._parts[group.rank])

    def wait(self) -> torch.Tensor:
        """Return the sums for this rank's rows, (rows, width)."""
        for arrival in self._arrivals:
            arrival.wait()
        self._arrivals = []
        return self._parts.sum(0)


def product_with_gathered(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, lane: Lane, chunks: int | None
) -> torch.Tensor:
    """Return ``x weightᵀ + bias`` of the rows (rows, in) of all ranks: (W * rows, out). Collective."""
    return GatheredRows(rows, group, lane, chunks).times(weight, bias)


def summed_product(
    input: torch.Tensor, weight: torch.Tensor, group: Group, lane: Lane, chunks: int | None
) -> SummedRows:
    """Start the sum over the ranks of ``input weightᵀ``, (W * rows, in) to each rank's (rows, out). Collective."""

    def compute(first: int, end: int, out: torch.Tensor) -> None:
        _product(input[first:end], weight, None, out)

    return SummedRows(compute, input, (len(input), len(weight)), group, lane, chunks)


def reduced_product(
    input: torch.Tensor, weight: torch.Tensor, group: Group, lane: Lane, chunks: int | None
) -> Callable[[], torch.Tensor]:
    """Start the sum over the ranks of ``input weightᵀ``, (n, in) to the whole (n, out) on each; return what waits for it.

    The rows are computed in ``chunks``, each of which is summed while the next is computed. Collective. Volume: an
    all-reduce of n * out.
    """
    output = torch.empty((len(input), len(weight)), dtype=input.dtype, device=input.device)
    twin, marks = lane.group(group), []
    for part in _parts(len(input), chunks):
        _product(input[part], weight, None, output[part])
        lane.after(lane.here())
        marks.append(lane.run(functools.partial(twin.all_reduce, output[part])))

    def wait() -> torch.Tensor:
        for mark in marks:
            mark.wait()
        return output

    return wait


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(input, weight.t(), out=out)
    else:
        torch.addmm(bias, input, weight.t(), out=out)


def _exchange(group: Group, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> Callable[[], Work]:
    return lambda: group.exchange([(outgoing, to)], [(incoming, source)])


def _pieces(group: Group, rows: int, chunks: int | None) -> list[tuple[int, int, slice]]:
    """Return ``(rank to send to, rank to receive from, which of its rows)``, in the order of the pieces: see the note on it."""
    steps = range(1, group.size)
    return [
        ((group.rank + step) % group.size, (group.rank - step) % group.size, part)
        for step in steps
        for part in _parts(rows, chunks)
    ]


def _parts(rows: int, chunks: int | None) -> list[slice]:
    """Cut ``rows`` into ``chunks`` parts of nearly equal size, none of them empty; None: as many as keep a GPU busy.

    >>> _parts(5, 2), _parts(600, None)
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 600, None)])
    """
    count = rows // _MIN_ROWS if chunks is None else chunks
    step = -(-rows // max(1, min(count, rows)))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)] if rows else []
