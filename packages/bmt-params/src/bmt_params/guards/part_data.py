"""``PartData``: the ``.data`` of a parameter's part, which refuses what would be right for a whole
tensor only.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_params.guards.part_guard import Part, PartGuard


class PartData(PartGuard, torch.Tensor):
    """The ``.data`` of a part, which refuses what the part refuses. Operations on it return
    ordinary tensors.
    """

    _parameter: Part

    @classmethod
    def of(cls, parameter: Part, part: torch.Tensor) -> PartData:
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
    def whole_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self._parameter.whole_shape

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
