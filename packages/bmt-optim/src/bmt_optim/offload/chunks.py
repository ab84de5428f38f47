"""``ShardChunks``: the chunks in which one host shard is copied and stepped; made again if the plan
of updates changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bmt_core.run.lanes import Mark
from bmt_optim.adam.parameter_state import master_or_remainder
from bmt_optim.adam.update_plan import Update
from bmt_optim.offload.copies import Copied, Copies
from bmt_optim.offload.host_shard import HostShard, alias

Pair = tuple[torch.Tensor, torch.Tensor]


Piece = tuple[torch.nn.Parameter, int, int]
"""A parameter, and the range of its elements in one chunk."""


@dataclass
class KernelCall:
    """The part of an update in one chunk: arguments of ``adam_step``, pieces of ``parameters`` and
    their states on the host.
    """

    update: Update
    parameters: list[torch.nn.Parameter]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    masters: list[torch.Tensor] | list[None]


@dataclass
class Chunk:
    """Elements ``begin`` to ``end`` of a host shard, and the kernel calls that step them."""

    begin: int
    end: int
    pieces: list[Piece] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)


class ShardChunks:
    """The chunks of ``shard``, of at most ``chunk`` elements, that hold the parameters of
    ``updates``, in the order of memory.
    """

    def __init__(self, shard: HostShard, updates: Sequence[Update], chunk: int) -> None:
        self.shard = shard
        update_of = {p: update for update in updates for p in update.params}
        self.params = [p for p in shard.params if p in update_of]
        self._chunks = [
            Chunk(begin, min(begin + chunk, end))
            for first, end in self._ranges_of(self.params)
            for begin in range(first, end, chunk)
        ]
        for made in self._chunks:
            self._fill(made, update_of)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def copy_gradients(self, copies: Copies) -> list[Copied]:
        """Start copying the gradients to the host; return the end of each chunk's copy."""
        grads = self._gradients()
        base = self._base_of(grads)
        if base is not None:
            return self._copy_flat(grads[0], base, copies)
        return [copies.to_host(self._pairs_of(chunk)) for chunk in self._chunks]

    def copy_reduced(self, flat: torch.Tensor, done: Mark, copies: Copies) -> list[Copied]:
        """Start copying ``flat``, laid out like the parameters' storage, after ``done``; return the
        end of each chunk's copy.
        """
        base = int(flat.storage_offset()) + self.shard.begin
        return self._copy_flat(flat, base, copies, done)

    def gradients_lie_in(self, flat: torch.Tensor) -> bool:
        """Whether the gradients are slices of ``flat`` at the same places as the parameters in
        their storage.
        """
        grads = self._gradients()
        is_laid_out_alike = self._base_of(grads) == int(flat.storage_offset()) + self.shard.begin
        return (
            is_laid_out_alike
            and grads[0].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        )

    def stepped_weights(self, held: Sequence[Update]) -> list[Pair]:
        """Return (source, target) pairs to copy to the device after the step: all parameters but
        those of ``held`` updates.
        """
        shard, unmoved = self.shard, {p for update in held for p in update.params}
        moved = [p for p in self.params if p not in unmoved] if unmoved else self.params
        # Targets have version counters of their own: these late writes must not look like a user's
        # change of a parameter.
        if not shard.is_contiguous:
            return [
                (shard.views[p]["weight"], alias(p, int(p.storage_offset()), p.shape, p.stride()))
                for p in moved
            ]
        weight, target = (
            shard.flat["weight"],
            alias(shard.params[0], shard.begin, (shard.length,), (1,)),
        )
        return [
            (weight[begin:end], target[begin:end])
            for begin, end in self._ranges_of(moved, exactly=True)
        ]

    def _copy_flat(
        self, source: torch.Tensor, base: int, copies: Copies, after: Mark | None = None
    ) -> list[Copied]:
        whole = alias(source, base, (self.shard.length,), (1,))
        target = self.shard.flat["gradient"]
        return [
            copies.to_host([(whole[c.begin : c.end], target[c.begin : c.end])], after)
            for c in self._chunks
        ]

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def _base_of(self, grads: Sequence[torch.Tensor]) -> int | None:
        """Return the offset of ``grads`` in their storage if they are laid out there like the
        parameters in theirs; else None.
        """
        if (
            not self.shard.is_contiguous
            or len({grad.untyped_storage().data_ptr() for grad in grads}) != 1
        ):
            return None
        if [grad.stride() for grad in grads] != [p.stride() for p in self.params]:
            return None
        offsets = [int(grad.storage_offset()) for grad in grads]
        bases = {
            offset - self.shard.starts[p] for offset, p in zip(offsets, self.params, strict=True)
        }
        if len(bases) != 1:
            return None
        base = bases.pop()
        end = (base + self.shard.length) * self.shard.dtype.itemsize
        return base if base >= 0 and end <= grads[0].untyped_storage().nbytes() else None

    def _pairs_of(self, chunk: Chunk) -> list[Pair]:
        pairs: list[Pair] = []
        shard = self.shard
        for p, first, last in chunk.pieces:
            grad = p.grad
            assert grad is not None
            if shard.is_contiguous and grad.stride() == p.stride():
                source = alias(grad, int(grad.storage_offset()) + first, (last - first,), (1,))
                start = shard.starts[p]
                pairs.append((source, shard.flat["gradient"][start + first : start + last]))
            elif first == 0:  # laid out in another way: copied as a whole with its first piece
                pairs.append((grad.detach(), shard.views[p]["gradient"]))
        return pairs

    def _ranges_of(
        self, params: Sequence[torch.nn.Parameter], *, exactly: bool = False
    ) -> list[tuple[int, int]]:
        """Return the ranges of memory that hold ``params`` and no other parameters of the shard.

        With ``exactly`` they hold no gaps either, in which parameters of another optimizer, or of
        none, may lie.
        """
        ranges: list[tuple[int, int]] = []
        wanted = set(params)
        follows = False
        for p, start in self.shard.starts.items():
            if p not in wanted:
                follows = follows and not p.numel()
                continue
            end = start + p.numel()
            if follows and not (exactly and ranges[-1][1] < start):
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
            follows = True
        return [(begin, end) for begin, end in ranges if end > begin]

    def _fill(self, chunk: Chunk, update_of: dict[torch.nn.Parameter, Update]) -> None:
        of_update: dict[int, list[Piece]] = {}
        for p in self.params:
            start = self.shard.starts[p]
            first, last = max(chunk.begin - start, 0), min(chunk.end - start, p.numel())
            if first < last:
                chunk.pieces.append((p, first, last))
                of_update.setdefault(id(update_of[p]), []).append(chunk.pieces[-1])
        chunk.calls = [
            self._kernel_call(update_of[pieces[0][0]], pieces) for pieces in of_update.values()
        ]

    def _kernel_call(self, update: Update, pieces: list[Piece]) -> KernelCall:
        starts = self.shard.starts

        def column(flat: torch.Tensor) -> list[torch.Tensor]:
            return [flat[starts[p] + first : starts[p] + last] for p, first, last in pieces]

        flat, master = self.shard.flat, master_or_remainder(self.shard.flat)
        return KernelCall(
            update=update,
            parameters=[p for p, _, _ in pieces],
            params=column(flat["weight"]),
            grads=column(flat["gradient"]),
            exp_avgs=column(flat["exp_avg"]),
            exp_avg_sqs=column(flat["exp_avg_sq"]),
            masters=[None] * len(pieces) if master is None else column(master),
        )
