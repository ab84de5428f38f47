"""``HostSchedule``: in which pieces one host shard is copied and stepped; made once, until the plan of updates changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from bmt_core.run.lanes import Mark
from bmt_optim.adam.update_plan import Update
from bmt_optim.offload.copies import Copies, Done
from bmt_optim.offload.host_memory import CHUNK
from bmt_optim.offload.host_shard import HostShard, flat_gradient, shaped_like

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Rows:
    """What one kernel call steps in a chunk: the columns of ``adam_step``."""

    update: Update
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor | None] = field(default_factory=list)
    owners: list[torch.nn.Parameter] = field(default_factory=list)


@dataclass
class Chunk:
    """Elements ``begin`` to ``end`` of a host shard; ``pieces`` are (parameter, first and last element of it)."""

    begin: int
    end: int
    pieces: list[tuple[torch.nn.Parameter, int, int]] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)


class HostSchedule:
    """The chunks of ``shard`` that hold the parameters of ``updates``, in the order of their memory."""

    def __init__(self, shard: HostShard, updates: Sequence[Update], *, chunk: int = CHUNK) -> None:
        self.shard = shard
        update_of = {p: update for update in updates for p in update.params}
        self._starts = dict(zip(shard.params, shard.starts, strict=True))
        self.params = [p for p in shard.params if p in update_of]
        # Only what has gaps of its own, which belong to others, is copied in its shape; a slice has none.
        self._is_flat = all(_is_dense(p) for p in self.params)
        self._runs = self._runs_of(self.params)
        self.chunks = [
            Chunk(begin, min(begin + step, end))
            for first, end in self._runs
            for step in [chunk if self._is_flat else max(end - first, 1)]
            for begin in range(first, end, step)
        ]
        self._fill(update_of)

    def leave(self, copies: Copies) -> list[Done]:
        """Start copying the gradients to the host; return when each chunk is there."""
        grads = [p.grad for p in self.params]
        base = self._base_of(grads)
        if base is not None and grads and grads[0] is not None:
            return self._leave_flat(grads[0], base, copies)
        return [copies.out(self._pairs_of(chunk)) for chunk in self.chunks]

    def leave_early(self, flat: torch.Tensor, mark: Mark, copies: Copies) -> list[Done]:
        """Start copying ``flat``, laid out like the storage of the parameters, after ``mark``; return when each chunk is there."""
        base = int(flat.storage_offset()) + self.shard.begin
        return self._leave_flat(flat, base, copies, mark)

    def lies_in(self, flat: torch.Tensor) -> bool:
        """Whether the gradients are those slices of ``flat`` that the parameters are of their storage."""
        grads = [p.grad for p in self.params]
        if None in [None if grad is None else 0 for grad in grads]:
            return False
        storages = {grad.untyped_storage()._cdata for grad in grads if grad is not None}
        return storages <= {flat.untyped_storage()._cdata} and self._base_of(grads) in (
            None if not self.params else int(flat.storage_offset()) + self.shard.begin,
        )

    def way_back(self, held: Sequence[Update]) -> list[Pair]:
        """Return what is to be copied to the device, but for the parameters of ``held`` updates, which do not move."""
        weight = self.shard.flat["weight"]
        stays = {p for update in held for p in update.params}
        moving = [p for p in self.params if p not in stays] if stays else self.params
        if not self._is_flat:
            target = self.shard.target
            return [(self._shaped(p, weight), self._shaped(p, target)) for p in moving]
        runs = self._runs_of(moving, exactly=True)
        return [(weight[begin:end], self.shard.target[begin:end]) for begin, end in runs]

    def _shaped(self, p: torch.nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
        return shaped_like(p, flat, self._starts[p])

    def _leave_flat(self, source: torch.Tensor, base: int, copies: Copies, after: Mark | None = None) -> list[Done]:
        whole = flat_gradient(source, base, self.shard.length)
        target = self.shard.flat["gradient"]
        return [copies.out([(whole[c.begin : c.end], target[c.begin : c.end])], after) for c in self.chunks]

    def _base_of(self, grads: Sequence[torch.Tensor | None]) -> int | None:
        """Return where in the storage of all ``grads`` a slice begins that is laid out like the shard; None if there is none."""
        given = [grad for grad in grads if grad is not None]
        # Of one parameter alone any dense gradient is such a slice.
        if not self._is_flat or len({grad.untyped_storage()._cdata for grad in given}) != 1:
            return None
        if [grad.stride() for grad in given] != [p.stride() for p in self.params]:
            return None
        offsets = [int(grad.storage_offset()) for grad in given]
        bases = {offset - self._starts[p] for offset, p in zip(offsets, self.params, strict=True)}
        if len(bases) != 1:
            return None
        base = bases.pop()
        end = (base + self.shard.length) * self.shard.dtype.itemsize
        return base if base >= 0 and end <= given[0].untyped_storage().nbytes() else None

    def _pairs_of(self, chunk: Chunk) -> list[Pair]:
        pairs: list[Pair] = []
        target = self.shard.flat["gradient"]
        for p, first, last in chunk.pieces:
            grad = p.grad
            assert grad is not None
            if self._is_flat and grad.stride() == p.stride():
                place = self._starts[p]
                source = flat_gradient(grad, int(grad.storage_offset()) + first, last - first)
                pairs.append((source, target[place + first : place + last]))
            elif first == 0:  # in another layout: all at once, with its first piece
                pairs.append((grad.detach(), self.shard.gradient_of(p)))
        return pairs

    def _runs_of(self, params: Sequence[torch.nn.Parameter], *, exactly: bool = False) -> list[tuple[int, int]]:
        """Return the ranges of memory in which no other parameters of the shard lie.

        ``exactly``: nor gaps, in which parameters may lie that are another optimizer's, or nobody's.
        """
        runs: list[tuple[int, int]] = []
        wanted = set(params)
        follows = False
        for p, start in zip(self.shard.params, self.shard.starts, strict=True):
            if p not in wanted:
                follows = follows and not p.numel()
                continue
            end = start + (p.numel() if _is_dense(p) else self.shard.length)
            if follows and not (exactly and runs[-1][1] < start):
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
            follows = True
        return [(begin, end) for begin, end in runs if end > begin]

    def _fill(self, update_of: dict[torch.nn.Parameter, Update]) -> None:
        for p in self.params:
            start = self._starts[p]
            for chunk in self.chunks:
                if not self._is_flat:
                    first, last = 0, p.numel()
                else:
                    first, last = max(chunk.begin - start, 0), min(chunk.end - start, p.numel())
                if first < last:
                    chunk.pieces.append((p, first, last))
                    rows = chunk.rows.setdefault(id(update_of[p]), Rows(update_of[p]))
                    self._add_row(rows, p, start + first, start + last)

    def _add_row(self, rows: Rows, p: torch.nn.Parameter, begin: int, end: int) -> None:
        def piece(flat: torch.Tensor) -> torch.Tensor:
            return flat[begin:end] if self._is_flat else self._shaped(p, flat)

        flat, master = self.shard.flat, self.shard.master
        rows.params.append(piece(flat["weight"]))
        rows.grads.append(piece(flat["gradient"]))
        rows.exp_avgs.append(piece(flat["exp_avg"]))
        rows.exp_avg_sqs.append(piece(flat["exp_avg_sq"]))
        rows.masters.append(None if master is None else piece(master))
        rows.owners.append(p)


def schedules_of(shards: Iterable[HostShard], updates: Sequence[Update], *, chunk: int = CHUNK) -> list[HostSchedule]:
    """Return one schedule for each of ``shards``."""
    return [HostSchedule(shard, updates, chunk=chunk) for shard in dict.fromkeys(shards)]


def _is_dense(p: torch.Tensor) -> bool:
    if not p.numel():
        return True
    return p.numel() == 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
