"""``WholeParameter``: what a parameter is inside :func:`bmt_params.whole_parameters`."""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.torch_internals import set_data
from bmt_params.locality import Locality


class WholeParameter(torch.nn.Parameter):
    """An ordinary parameter, with the difference that torch counts writes through its ``.data``,
    too. ``nn.Parameter(p)`` of one is another one, which stays.
    """

    # Of a sharded parameter that is lent.
    label: str
    locality: tuple[Locality, ...]

    @property
    def is_lent(self) -> bool:
        """Whether this is a sharded parameter, and not a copy that was made of one."""
        return "_shard" in vars(self)

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""
        return f"{self.label or 'a parameter'} of shape {tuple(self.shape)}"

    @property
    def data(self) -> torch.Tensor:
        """The values; writes through it are counted."""
        return super().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value)

    def detach(self) -> torch.Tensor:
        """Return a view of the same class, which ``nn.Parameter(p)`` requires."""
        return super().detach().as_subclass(WholeParameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied
