"""``Shard``: the part of a flattened tensor that each rank of a group holds; gathers the whole and
reduces gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from bmt_core.comm.protocols import Group
from bmt_core.torch_internals import counting_versions


def even_ranges(numel: int, size: int) -> tuple[tuple[int, int], ...]:
    """Cut ``numel`` elements into ``size`` consecutive parts of equal length, the last ones shorter
    or empty.

    >>> even_ranges(5, 4)
    ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    return _equal_ranges(numel, -(-numel // size), size)


@dataclass(frozen=True)
class Shard:
    """How a tensor of ``shape`` is sharded over ``group``: rank i holds elements ``ranges[i]`` of
    the flattened tensor. A later rank may hold earlier elements.

    ``replicated`` means that every rank holds all elements, while gradients are still summed over
    ``group`` (ZeRO level 0). ``replicas`` are the ranks, one of each such group, that hold the same
    part as this one, and over which gradients are summed, too; None if there are no others.
    """

    shape: torch.Size
    ranges: tuple[tuple[int, int], ...]
    group: Group
    replicated: bool = False
    replicas: Group | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the whole."""
        return self.shape.numel()

    @property
    def start(self) -> int:
        """First element of this rank's part."""
        return self.ranges[self.group.rank][0]

    @property
    def end(self) -> int:
        """One past the last element of this rank's part."""
        return self.ranges[self.group.rank][1]

    @property
    def saved_range(self) -> tuple[int, int]:
        """The elements that this rank writes to a checkpoint, of those that it holds: an equal
        share if all hold all.
        """
        ranges = even_ranges(self.numel, self.group.size) if self.replicated else self.ranges
        return ranges[self.group.rank]

    @cached_property
    def longest(self) -> int:
        """Number of elements of the longest part, to which all parts are padded when they
        are sent.
        """
        return max(end - start for start, end in self.ranges)

    @cached_property
    def _is_contiguous(self) -> bool:
        """Whether the parts are of equal length and in order, the last ones shorter, so that padded
        parts are the whole.
        """
        return self.ranges == _equal_ranges(self.ranges[-1][1], self.longest, len(self.ranges))

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's 1-D part of ``full`` (any shape with ``numel`` elements); a view where
        that is possible.
        """
        return full.reshape(-1)[self.start : self.end]

    def assemble(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole, of ``shape``, from every rank's ``part``. Collective over the group."""
        if self.replicated or self.group.size == 1:
            return part.reshape(self.shape)
        longest = self.longest
        gathered = torch.empty(self.group.size * longest, dtype=part.dtype, device=part.device)
        self.group.all_gather(gathered, _padded(part, longest)).wait()
        return self.joined(gathered)

    def assemble_on(self, root: int, part: torch.Tensor) -> torch.Tensor | None:
        """Send every rank's ``part`` to rank ``root`` of the group, and return the whole there,
        None on others. Collective.
        """
        if self.replicated or self.group.size == 1:
            return part.reshape(self.shape) if self.group.rank == root else None
        own = part.contiguous()
        if self.group.rank != root:
            # Even if it is empty: the root receives from all.
            self.group.exchange([(own, root)], []).wait()
            return None
        whole = torch.empty(self.numel, dtype=part.dtype, device=part.device)
        whole[self.start : self.end] = own
        # Each part is received where it lies in the whole.
        others = [(whole[start:end], i) for i, (start, end) in enumerate(self.ranges) if i != root]
        self.group.exchange([], others).wait()
        return whole.view(self.shape)

    def joined(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the whole, of ``shape``, from the 1-D tensor of all parts, each padded to
        :attr:`longest`; a view if possible.
        """
        longest = self.longest
        if self._is_contiguous:
            return padded[: self.numel].view(self.shape)
        # Parts of two stages are in another order than their ranks.
        in_order = sorted((start, end, i) for i, (start, end) in enumerate(self.ranges))
        parts = [padded[i * longest :][: end - start] for start, end, i in in_order]
        return torch.cat(parts).view(self.shape)

    def spread(self, full: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy each rank's part of ``full`` to its row of ``rows`` (group size × :attr:`longest`),
        whose padding stays.
        """
        full = full.reshape(-1)
        if self.numel == rows.numel() and self._is_contiguous:
            rows.copy_(full.view(rows.shape))
            return
        for row, (start, end) in zip(rows, self.ranges, strict=True):
            row[: end - start] = full[start:end]

    def reduce(self, full: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """Sum every rank's ``full``, half types in float32, divide by ``divisor``, and return this
        rank's part. Collective.

        The result is float32 if ``full`` is of a half type.
        """
        full = full.reshape(-1).contiguous()  # autograd hands out expanded tensors too
        wide = summation_dtype(full.dtype)
        if self.replicated or self.group.size == 1:
            # A copy, because it is summed in place, and autograd may need the gradient elsewhere.
            part = full.to(wide, copy=True)
            self.group.all_reduce(part).wait()
        else:
            output = torch.empty(self.longest, dtype=wide, device=full.device)
            # A half type is sent as it is and summed in float32: see Group.reduce_scatter().
            self.group.reduce_scatter(output, self._spread(full)).wait()
            part = output[: self.end - self.start]
        if self.replicas is not None:
            self.replicas.all_reduce(part).wait()
        return part if divisor == 1 else part.div_(divisor)

    def _spread(self, full: torch.Tensor) -> torch.Tensor:
        if self.numel == self.group.size * self.longest and self._is_contiguous:
            return full
        rows = full.new_zeros(self.group.size, self.longest)
        self.spread(full, rows)
        return rows.view(-1)


def whole_tensor_shard(shape: torch.Size, group: Group, replicas: Group | None) -> Shard:
    """Return the layout of a parameter that is sharded alone: equal consecutive parts."""
    return Shard(shape, even_ranges(shape.numel(), group.size), group, replicas=replicas)


def own_part(data: torch.Tensor, shard: Shard, device: torch.device) -> torch.Tensor:
    """Return a copy on ``device`` of this rank's part of ``data``; uninitialised memory if ``data``
    is on the meta device.
    """
    if data.is_meta:
        return torch.empty(shard.end - shard.start, dtype=data.dtype, device=device)
    # A copy, so that the memory of the whole can be freed.
    with counting_versions(), torch.no_grad():
        return shard.part(data.detach()).to(device, copy=True)


def summation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed: float32 for anything narrower.

    >>> summation_dtype(torch.bfloat16), summation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def assemble_all(parts: Sequence[tuple[Shard, torch.Tensor]]) -> list[torch.Tensor]:
    """Return what :meth:`Shard.assemble` returns of each part, gathered together by group and
    dtype. Collective.
    """
    wholes: dict[int, torch.Tensor] = {}
    together: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, (shard, part) in enumerate(parts):
        if shard.replicated or shard.group.size == 1:
            wholes[index] = shard.assemble(part)
        else:
            # In the order of the parts, which is the same on all ranks.
            together.setdefault((id(shard.group), part.dtype), []).append(index)
    for indices in together.values():
        shards = [parts[index][0] for index in indices]
        group, lengths = shards[0].group, [shard.longest for shard in shards]
        own = torch.cat([_padded(parts[i][1], n) for i, n in zip(indices, lengths, strict=True)])
        gathered = own.new_empty(group.size * own.numel())
        group.all_gather(gathered, own).wait()
        of_each = torch.split(gathered.view(group.size, -1), lengths, 1)
        for index, shard, padded in zip(indices, shards, of_each, strict=True):
            wholes[index] = shard.joined(padded.reshape(-1))
    return [wholes[index] for index in range(len(parts))]


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    part = part.contiguous()
    if part.numel() == length:
        return part
    padded = part.new_zeros(length)
    padded[: part.numel()] = part
    return padded


def _equal_ranges(numel: int, length: int, count: int) -> tuple[tuple[int, int], ...]:
    return tuple((min(i * length, numel), min((i + 1) * length, numel)) for i in range(count))


def ranges_within(
    outer: Sequence[tuple[int, int]], inner: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Join the elements in the ranges ``outer``, take the ranges ``inner`` of these, and return
    where the taken ones are.

    >>> ranges_within([(2, 4), (8, 10)], [(1, 3)])
    [(3, 4), (8, 9)]
    """
    begins = list(accumulate((end - start for start, end in outer), initial=0))
    found = []
    for start, end in inner:
        i = bisect_right(begins, start) - 1
        while start < end:
            length = min(end, begins[i + 1]) - start
            first = outer[i][0] + start - begins[i]
            found.append((first, first + length))
            start, i = start + length, i + 1
    return found
