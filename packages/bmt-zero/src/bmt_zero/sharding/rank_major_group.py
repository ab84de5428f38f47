"""``RankMajorGroup``: parameters that are each sharded by itself, whose parts on one rank lie back to back.

An optimizer may know the parts before the group is made, so which elements a rank has stays as it was: only their memory
moves. Gathered, the whole is one row per rank, and whole parameters and gradients are copied out of and into the rows: with
embeddings and a head in mind, large tensors and few, once per step. A row ends with one element per parameter for
gradients: whether the rank has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bmt_core.params.parameter import DistributedParameter, lend_data
from bmt_zero.sharding.flat_layout import flat_layout
from bmt_zero.sharding.local_shard import LocalShard


class RankMajorGroup(LocalShard):
    """``parameters`` of one dtype that are sharded over the same ranks, several; moves their parts into its shard."""

    def __init__(self, parameters: Sequence[DistributedParameter]) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self._longest = [parameter._shard.longest for parameter in parameters]
        row = flat_layout([*self._longest, len(parameters)], first.dtype.itemsize, ranks=1)
        *self._starts, self._flags = row.offsets
        # This rank's own parts may be shorter than the longest.
        pieces, indices = replace(row, numels=(*[p.numel() for p in parameters], len(parameters))).pieces()
        super().__init__(
            pieces, indices[:-1], ranks=first.group, replicated=False, dtype=first.dtype, device=first.device
        )
        parts = torch.split(self.shard, self.pieces)
        for parameter, index in zip(parameters, self.indices, strict=True):
            lend_data(parameter, parts[index].copy_(parameter.data))

    def wholes(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole parameters that were ``gathered``, in memory of their own."""
        rows = gathered.view(self.ranks.size, -1)
        return [
            parameter._shard.joined(
                rows[:, start : start + longest].clone(memory_format=torch.contiguous_format).view(-1)
            )
            for parameter, start, longest in zip(self.parameters, self._starts, self._longest, strict=True)
        ]

    def rows_of(self, grads: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Return whole gradients, flat, one row for each rank: its parts of them, zero where there is none, and which are there."""
        flat = torch.zeros(self.total, dtype=dtype, device=self.device)
        rows = flat.view(self.ranks.size, -1)
        for number, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is not None:
                start = self._starts[number]
                places = rows[:, start : start + self._longest[number]]
                parameter._shard.spread(grad.to_dense() if grad.is_sparse else grad, places)
                rows[:, self._flags + number] = 1
        return flat

    def present(self, reduced: torch.Tensor) -> list[bool]:
        """Return which gradients any rank had, of those whose sum is ``reduced``. The host waits for the device."""
        flags = reduced[self._flags : self._flags + len(self.parameters)]
        return [number != 0 for number in flags.tolist()]
