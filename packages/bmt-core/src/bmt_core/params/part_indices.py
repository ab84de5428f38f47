"""Indices into a part of a parameter, such as ``p.data[0].zero_()``, raise.

A part is flat: its element 0 is not row 0 of the parameter, and on most ranks not its element 0
either. Other functions that select by position, such as ``p.data.narrow(0, 0, 2)``, are
not detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bmt_core.errors import ConfigError


class NoPartIndices:
    """Overrides indexing and iteration: they raise if they would select other elements than in the
    whole parameter.
    """

    __slots__ = ()

    @property
    def is_indexable(self) -> bool:
        """Whether an index selects the same elements in this tensor as in the whole parameter, on
        every rank.
        """
        raise NotImplementedError

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        self._check(index)
        return torch.Tensor.__getitem__(self, index)  # type: ignore[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check(index)
        torch.Tensor.__setitem__(self, index, value)  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        self._check(0)
        return iter(torch.Tensor.unbind(self))  # type: ignore[arg-type]

    def _check(self, index: Any) -> None:
        if not self.is_indexable and not _selects_each_element_by_itself(index):
            raise ConfigError(
                f"An index into {self.description} would select elements of this rank's part of it,"
                " which is flat, and not rows or elements of the whole parameter. Read and write"
                " whole parameters inside whole_parameters(module), or, where a DistributedModule"
                " fills its own, through the attribute: self.weight.data[0].zero_(). The part"
                " is p.detach()."
            )


def _selects_each_element_by_itself(index: Any) -> bool:
    """Whether ``index`` is ``:``, ``...``, None or a mask, which are right for a part, too."""
    if isinstance(index, torch.Tensor):
        return index.dtype == torch.bool
    return index is None or index is Ellipsis or (isinstance(index, slice) and index == slice(None))
