"""``RankMajorGroup``: parameters that are sharded separately, with each rank's parts back to back in one tensor.

An optimizer may hold the parts before the group is made, so each rank keeps the elements it had, and only their memory moves.
The gathered tensor has one row per rank. Whole parameters are copied out of the rows, and whole gradients into them, once per
step. That suits few large tensors, such as embeddings and a head. A row ends with one flag for each parameter: whether the
rank has a gradient of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bmt_core.params.parameter import DistributedParameter, set_data_silently
from bmt_zero.sharding.flat_layout import flat_layout
from bmt_zero.sharding.parameter_group import ParameterGroup


class RankMajorGroup(ParameterGroup):
    """``parameters`` of one dtype, sharded over the same ranks (at least two)."""

    def __init__(self, parameters: Sequence[DistributedParameter]) -> None:
        super().__init__(parameters, ranks=parameters[0].shard_group, replicated=False, device=parameters[0].device)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of the whole parameters that were gathered into ``flat``."""
        rows = flat.view(self.ranks.size, -1)
        places = zip(self.parameters, self._starts, self._longest, strict=True)
        parts = [(p, rows[:, start : start + longest].contiguous().view(-1)) for p, start, longest in places]
        return [parameter._shard.joined(padded) for parameter, padded in parts]

    def rows_of(self, grads: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Return whole gradients as rows of parts, to be reduced: zero where one is None, with a flag for each that is there."""
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
        """Return, for each parameter, whether any rank had a gradient; ``reduced`` is the sum. The host waits for the device."""
        return [number != 0 for number in reduced[self._flags :][: len(self.parameters)].tolist()]

    def _lay_out(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[int], list[int]]:
        numels = [parameter.numel() for parameter in parameters]
        self._longest = [parameter._shard.longest for parameter in parameters]  # type: ignore[attr-defined]
        row = flat_layout([*self._longest, len(numels)], self.dtype.itemsize, ranks=1)
        *self._starts, self._flags = row.offsets
        pieces, indices = replace(row, numels=(*numels, len(numels))).pieces()  # own parts may be shorter
        return pieces, indices[:-1]

    def _adopt(self, parameter: torch.nn.Parameter, number: int, place: torch.Tensor) -> DistributedParameter:
        assert isinstance(parameter, DistributedParameter)
        set_data_silently(parameter, place.copy_(parameter.data))
        return parameter
