"""Matrix products during which input rows arrive from other ranks, or output rows are sent to them.

Each of the W ranks of the tensor-parallel group has an equal part of the rows, in the order of the
ranks. Inputs are matrices (rows, features), and ``factor`` is (features, output features). Autograd
does not record these functions: linear_products.py calls them in forward and in backward.

[Note: order of the pieces] Where rows are gathered, a rank first multiplies its own rows, while the
rows of the others arrive. Where the output is scattered, a rank computes the other ranks' rows
first, so that these travel while it computes its own. In step s rank r receives from rank r - s and
sends to rank r + s, so in each step every rank sends and receives the same amount. A piece is all
rows of one rank, or one of up to ``chunks`` parts of them. There are fewer parts if rows arrive
early enough, because the product computed meanwhile (of a rank's own rows, or for the weight
gradient) takes longer than the transfer. For few rows one product may be better: see FEW_ROWS.

Memory is allocated on the computation's stream, before the lane is told to start after that stream:
see [Note: buffer lifetime] in bmt_core.run.lanes, and [Note: memory of a transfer]
in row_transfers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from bmt_tp.row_transfers import Piece, UnderWay, begin_transfer, part_of
from bmt_tp.tensor_group import TensorRanks, tensor_ranks

MIN_ROWS = 4096
"""Rows of the smallest piece on CUDA. A product of fewer rows leaves the device idle for longer
than the overlap saves.
"""

FEW_ROWS = 2048
"""With fewer rows per rank, a rank may wait for a transfer and compute one product, instead of one
for each rank's rows.

Such products are so short that the host's calls determine the time. Where rows are gathered, this
is done only if the gradient of the weight needs all rows in one tensor anyway.
"""


class GatheredRows:
    """The rows of all ranks, valid until :meth:`end`; ``rows`` are this rank's.

    The transfer starts when the object is made. ``needs_all`` says that the caller calls
    :meth:`times` at once and :meth:`wait` after it. Collective. Volume: each rank receives
    (W - 1) * rows.
    """

    def __init__(
        self, rows: torch.Tensor, chunks: int | None = 1, *, needs_all: bool = False
    ) -> None:
        ranks = tensor_ranks()
        self._rank = ranks.rank
        self._own = rows.contiguous()
        self._has_own = False  # whether this rank's rows were copied to those of all ranks
        self._pieces, are_few = _pieces(ranks, rows.shape[0], chunks, 2 * _min_rows(rows))
        self._waits = needs_all and are_few
        self._transfer = begin_transfer(
            ranks,
            self._own,
            (ranks.size, *rows.shape),
            waits_for_readers=True,
            beside=not self._waits,
        )
        for piece in self._pieces:
            self._transfer.start(part_of(self._own, piece.part), piece)

    def wait(self) -> torch.Tensor:
        """Wait for the remaining rows and return the rows of all ranks, (W * rows, ...)."""
        transfer = self._transfer
        transfer.wait()
        if not self._has_own:
            transfer.of_ranks[self._rank].copy_(self._own)
            self._has_own = True
        return transfer.joined_rows

    def times(self, factor: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``rows factor + bias`` of all ranks' rows, (W * rows, out)."""
        if self._waits:
            rows = self.wait()
            return rows.mm(factor) if bias is None else torch.addmm(bias, rows, factor)
        arriving = self._transfer.of_ranks
        output = self._own.new_empty((*self._transfer.all_rows.shape[:2], factor.shape[1]))
        of_ranks = output.unbind()
        _product(self._own, factor, bias, of_ranks[self._rank])
        for _, source, part in self._pieces:
            self._transfer.wait_for_next()
            _product(part_of(arriving[source], part), factor, bias, part_of(of_ranks[source], part))
        return output.flatten(0, 1)

    def end(self) -> None:
        """Release the memory of the rows. All work that reads them must have been queued."""
        self._transfer.end()


def summed_product(
    input: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int | None,
    *,
    waits_at_once: bool = False,
) -> Callable[[], torch.Tensor]:
    """Start ``input factor`` of (W * rows, in), and reduce-scatter it: each rank gets its rows
    (rows, out), plus ``bias``.

    Return a function that waits for the other ranks' terms and adds them in float32, rounding once.
    ``bias`` is the same on all ranks. ``waits_at_once`` says that the caller computes nothing
    before it calls that function; only then rows are sent in ``chunks``. Collective. Volume: each
    rank sends (W - 1) * rows.
    """
    ranks = tensor_ranks()
    rows = input.shape[0] // ranks.size
    pieces, are_few = _pieces(ranks, rows, chunks if waits_at_once else 1, _min_rows(input))
    if are_few:
        return _summed_at_once(ranks, input, factor, bias, pieces, waits_at_once=waits_at_once)
    return _summed_in_pieces(ranks, input, factor, bias, pieces, waits_at_once=waits_at_once)


def _summed_at_once(
    ranks: TensorRanks,
    input: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    pieces: Sequence[Piece],
    *,
    waits_at_once: bool,
) -> Callable[[], torch.Tensor]:
    # One rank adds the bias for all ranks.
    product = input.mm(factor) if bias is None or ranks.rank else torch.addmm(bias, input, factor)
    terms = product.chunk(ranks.size)
    transfer = begin_transfer(
        ranks, product, (ranks.size, *terms[0].shape), beside=not waits_at_once
    )
    for piece in pieces:
        transfer.start(terms[piece.to], piece)

    def wait() -> torch.Tensor:
        transfer.wait()
        if ranks.size == 2:
            total = terms[ranks.rank] + transfer.of_ranks[1 - ranks.rank]
        else:
            transfer.of_ranks[ranks.rank].copy_(terms[ranks.rank])
            total = transfer.all_rows.sum(0)
        transfer.end()
        return total

    return wait


def _summed_in_pieces(
    ranks: TensorRanks,
    input: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    pieces: Sequence[Piece],
    *,
    waits_at_once: bool,
) -> Callable[[], torch.Tensor]:
    inputs = input.chunk(ranks.size)
    shape = (ranks.size, inputs[0].shape[0], factor.shape[1])
    transfer = begin_transfer(ranks, input, shape)
    parts, sent = transfer.of_ranks, input.new_empty(shape).unbind()
    # With two ranks, the product of this rank's rows can add the other rank's term (addmm), if
    # something hides its transfer: other work of the caller, or earlier pieces.
    adds = ranks.size == 2 and not (waits_at_once and len(pieces) == 1)
    for piece in pieces:
        outgoing = part_of(sent[piece.to], piece.part)
        _product(part_of(inputs[piece.to], piece.part), factor, bias if adds else None, outgoing)
        transfer.start(outgoing, piece)
    if not adds:
        _product(inputs[ranks.rank], factor, bias, parts[ranks.rank])

    def wait() -> torch.Tensor:
        if adds:
            total = input.new_empty(shape[1:])
            for _, source, part in pieces:
                transfer.wait_for_next()
                arrived, own = part_of(parts[source], part), part_of(inputs[ranks.rank], part)
                torch.addmm(arrived, own, factor, out=part_of(total, part))
        else:
            transfer.wait()
            total = parts[0] + parts[1] if ranks.size == 2 else transfer.all_rows.sum(0)
        transfer.end()
        return total

    return wait


def reduced_product(
    input: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, chunks: int | None
) -> Callable[[], torch.Tensor]:
    """Start the product ``input factor`` of (n, in), and all-reduce it: every rank gets (n, out),
    plus ``bias``.

    Return a function that waits for the sum, which the backend forms in the input's dtype.

    The rows are computed in up to ``chunks`` parts; one is summed while the next is computed.
    Collective. Volume: an all-reduce of n * out.
    """
    ranks = tensor_ranks()
    output = input.new_empty((len(input), factor.shape[1]))
    under_way = UnderWay()
    for part in _parts(len(input), chunks, _min_rows(input)):
        summed = part_of(output, part)
        _product(part_of(input, part), factor, None, summed)
        ranks.lane.follow()
        under_way.add(ranks.lane.run(functools.partial(ranks.in_lane.all_reduce, summed)), output)

    def wait() -> torch.Tensor:
        under_way.wait()
        return output if bias is None else output.add_(bias)

    return wait


def _product(
    input: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(input, factor, out=out)
    else:
        torch.addmm(bias, input, factor, out=out)


def _pieces(
    ranks: TensorRanks, rows: int, chunks: int | None, least: int
) -> tuple[tuple[Piece, ...], bool]:
    """Return the exchanges of ``rows`` rows of each rank, and whether one product is better.

    See [Note: order of the pieces] and FEW_ROWS.
    """
    return _pieces_of(ranks.rank, ranks.size, rows, chunks, least)


@functools.lru_cache(maxsize=4096)
def _pieces_of(
    rank: int, size: int, rows: int, chunks: int | None, least: int
) -> tuple[tuple[Piece, ...], bool]:
    parts = _parts(rows, chunks, least)
    pieces = tuple(
        Piece((rank + step) % size, (rank - step) % size, part)
        for step in range(1, size)
        for part in parts
    )
    return pieces, parts == [None] and rows < FEW_ROWS


def _min_rows(input: torch.Tensor) -> int:
    return MIN_ROWS if input.is_cuda else 1


def _parts(rows: int, chunks: int | None, least: int) -> list[slice | None]:
    """Cut ``rows`` into ``chunks`` parts of nearly equal size, each of at least ``least`` rows;
    None: of at least MIN_ROWS, too.

    >>> _parts(5, 2, 1), _parts(600, 2, 512), _parts(0, 2, 1)
    ([slice(0, 3, None), slice(3, 5, None)], [None], [])
    >>> [(part.start, part.stop) for part in _parts(8192, None, 1)]
    [(0, 4096), (4096, 8192)]
    """
    count = max(1, min(rows // max(least, MIN_ROWS) if chunks is None else chunks, rows // least))
    if count == 1:
        return [None] if rows else []
    step = -(-rows // count)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
