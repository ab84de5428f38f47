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
        self._rank = group.rank
        self._own = rows.contiguous()
        self._all = torch.empty((group.size, *rows.shape), dtype=rows.dtype, device=rows.device)
        self._pieces = _pieces(group, len(rows), chunks)
        twin = lane.group(group)
        lane.after(lane.here())
        self._arrivals: list[Mark] = [
            lane.run(_exchange(twin, self._own[part], to, self._all[source][part], source))
            for to, source, part in self._pieces
        ]

    def wait(self) -> torch.Tensor:
        """Return the rows of all ranks, (W * rows, ...), when they are there."""
        for arrival in self._arrivals:
            arrival.wait()
        self._all[self._rank] = self._own
        return self._all.flatten(0, 1)

    def times(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``rows weightᵀ + bias`` of all ranks' rows, (W * rows, out), of two-dimensional rows."""
        size, rows, _ = self._all.shape
        output = torch.empty((size, rows, len(weight)), dtype=self._all.dtype, device=self._all.device)
        _product(self._own, weight, bias, output[self._rank])
        for (_, source, part), arrival in zip(self._pieces, self._arrivals, strict=True):
            arrival.wait()
            _product(self._all[source][part], weight, bias, output[source][part])
        return output.flatten(0, 1)


def summed_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    lane: Lane,
    chunks: int | None,
) -> Callable[[], torch.Tensor]:
    """Start the sum over the ranks of ``input weightᵀ``, (W * rows, in) to each rank's (rows, out), plus ``bias`` once.

    Return what waits for it and adds the parts up, in float32, rounded once. Collective. Volume: each rank sends (W - 1) * rows.
    """
    size, rows = group.size, len(input) // group.size
    parts = torch.empty((size, rows, len(weight)), dtype=input.dtype, device=input.device)
    sent = torch.empty((size - 1, rows, len(weight)), dtype=input.dtype, device=input.device)
    twin, arrivals = lane.group(group), []
    for to, source, part in _pieces(group, rows, chunks):
        outgoing = sent[(to - group.rank) % size - 1][part]
        _product(input[to * rows : (to + 1) * rows][part], weight, None, outgoing)
        lane.after(lane.here())
        # With what the lane reads, which is kept until the computation has waited for the lane.
        arrivals.append((lane.run(_exchange(twin, outgoing, to, parts[source][part], source)), outgoing))
    _product(input[group.rank * rows : (group.rank + 1) * rows], weight, bias, parts[group.rank])

    def wait() -> torch.Tensor:
        for arrival, _ in arrivals:
            arrival.wait()
        return parts[0] + parts[1] if size == 2 else parts.sum(0)

    return wait


def reduced_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    lane: Lane,
    chunks: int | None,
) -> Callable[[], torch.Tensor]:
    """Start the sum over the ranks of ``input weightᵀ``, (n, in) to (n, out) on each, plus ``bias``; return what waits for it.

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
        return output if bias is None else output.add_(bias)

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
