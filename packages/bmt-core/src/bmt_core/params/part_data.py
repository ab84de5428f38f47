"""``PartData``: the ``.data`` of a parameter's part, which refuses what would be right for a whole
tensor only.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bmt_core.params.part_indices import NoPartIndices
from bmt_core.params.random_fills import NoRandomFills


class PartialParameter(Protocol):
    """What :class:`PartData` asks of its parameter."""

    @property
    def is_part(self) -> bool:
        """See :class:`NoRandomFills`."""

    @property
    def is_indexable(self) -> bool:
        """See :class:`NoPartIndices`."""

    @property
    def ndim(self) -> int:
        """The number of dimensions of the whole parameter."""

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""


class PartData(NoRandomFills, NoPartIndices, torch.Tensor):
    """The ``.data`` of a part: refuses random fills and indices. Operations on it return
    ordinary tensors.
    """

    __torch_function__ = torch.nn.Parameter.__torch_function__

    _parameter: PartialParameter

    @classmethod
    def of(cls, parameter: PartialParameter, part: torch.Tensor) -> PartData:
        """Return ``part``, this rank's part of ``parameter``, as this class."""
        made = part.as_subclass(cls)
        made._parameter = parameter
        return made

    @property
    def is_part(self) -> bool:
        return self._parameter.is_part

    @property
    def is_indexable(self) -> bool:
        return self._parameter.is_indexable

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """See :attr:`DistributedParameter.ndim`."""
        return self._parameter.ndim

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""
        return self._parameter.description

    def detach(self) -> PartData:
        """Return a view of the same class: ``nn.Parameter(p.data)`` requires that ``detach()``
        keeps the class.
        """
        return PartData.of(self._parameter, super().detach())

    # torch annotates nothing.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))  # which takes elements by index

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
