"""``Layout``: the structure of a value that stages send each other, made of nested containers, tensors and other values."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from bmt_core.nested import map_tensors, tensors_in


class Layout:
    """A nested value with meta tensors in place of its tensors, of the same shapes, dtypes and ``requires_grad``.

    Layouts can be compared, and sent to other ranks.
    """

    def __init__(self, value: Any) -> None:
        self._value = map_tensors(_empty, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())

    def __repr__(self) -> str:
        parts = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors()]
        return ", ".join(parts) or "no tensor"

    def text(self) -> str:
        """Return a text that is the same for equal layouts, on all ranks."""
        text = repr(self._value)
        return (
            pickle.dumps(self._value).hex() if " at 0x" in text else text
        )  # addresses of objects differ between ranks

    def check_can_be_sent(self) -> None:
        """Raise ``TypeError`` if a value cannot be pickled."""
        try:
            pickle.dumps(self._value)
        except Exception as error:  # pickle raises many types
            raise TypeError(
                f"The output of a part that another stage computes on must be picklable: {error}"
            ) from error

    def tensors(self) -> list[torch.Tensor]:
        """Return the meta tensors, in order."""
        return tensors_in(self._value)

    def differentiable(self) -> list[torch.Tensor]:
        """Return those of :meth:`tensors` that need gradients."""
        return [tensor for tensor in self.tensors() if tensor.requires_grad]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with ``tensors`` in it."""
        remaining = iter(tensors)
        return map_tensors(lambda _: next(remaining), self._value)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
