"""``SecondaryShard``: what a Block's parameters are gathered from with ``optimizer_shards="all"``.

[Note: two stages] N ranks see different data, and S of them are of one ``shard_size``. Each rank
has 1/N of a Block's parameters, gradients and optimizer states. After each change of the values,
and after each backward pass that has reduced gradients outside of ``no_sync``, because a change
usually follows it, it gathers its secondary shard, 1/S of the parameters, from the N/S ranks at its
place among others (``across``). Blocks are gathered from secondary shards, among S ranks
(``inside``). Gradients go the other way: they are reduced to 1/S inside, and then to 1/N across.

So slices that lie together in a secondary shard belong to ranks that are S apart: the rank at
place i inside, and at place j across, has slice i * N/S + j of the flat tensor.
"""

from __future__ import annotations

from collections import Counter

import torch

from bmt_core.comm.protocols import Group, Work
from bmt_core.run.runtime import current
from bmt_core.run.topology import REPLICA_AXIS
from bmt_zero.param_dtype import gather_in_dtype


class SecondaryShard:
    """This rank's secondary shard of parameters that are sharded over ``group``. See
    [Note: two stages].

    ``inside`` and ``across`` are the groups of both stages. ``places[i]`` is the number of the
    slice of rank i of ``group``.
    """

    def __init__(self, group: Group, inside: Group, across: Group) -> None:
        self.inside = inside
        self.across = across
        axis_rank, seen = current().topology.axis_rank, Counter[int]()
        self.places: list[int] = []
        for rank in group.ranks:
            number = axis_rank(REPLICA_AXIS.name, rank)
            self.places.append(seen[number] * across.size + number)
            seen[number] += 1
        self._version = -1  # of the values when they were gathered
        self._is_captured = False
        self._memory: torch.Tensor | None = None

    @classmethod
    def of(cls, group: Group) -> SecondaryShard | None:
        """Return that of parameters sharded over ``group``; None if they need none."""
        stages = current().topology.two_stages(group)
        return None if stages is None else cls(group, *stages)

    def is_outdated(self, version: int) -> bool:
        """Return whether the ``version`` of the values must be gathered, which the caller
        does now.
        """
        is_cuda = current().device.type == "cuda"
        # A graph that is captured runs later, with other values, and may change the parameters
        # without a word.
        self._is_captured |= is_cuda and torch.cuda.is_current_stream_capturing()
        before, self._version = self._version, version
        return self._is_captured or version != before

    def refresh(self, part: torch.Tensor, dtype: torch.dtype) -> Work:
        """Fill it with the ``part`` of each rank of ``across``, in ``dtype``. Collective over
        these.
        """
        if self._memory is None:
            self._memory = part.new_empty(part.numel() * self.across.size, dtype=dtype)
        return gather_in_dtype(self.across, part, self._memory)

    def gather(self, output: torch.Tensor) -> Work:
        """Start to fill ``output`` with those of all ranks of ``inside``. Collective over these."""
        assert self._memory is not None, "the first gather comes after a refresh"
        return self.inside.all_gather(output, self._memory)
