"""``OptionLink``: keeps options alike in a group of the program and in that of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import version_of

PARAMETERS = ("params", "param_names")


class OptionLink:
    """Links ``shown``, a group that programs and schedulers write to, with ``used``, the group of
    an optimizer that steps.

    An optimizer may count steps in its group, or decide something there. :meth:`push` brings the
    program's values to ``used``, and :meth:`changed` returns what the optimizer has changed since.
    Tensors are copied, because several optimizers use one group.
    """

    def __init__(self, used: dict[str, Any]) -> None:
        self._used = used
        self._pushed: dict[str, tuple[Any, int | None]] = {}
        self._left: dict[str, tuple[Any, int | None]] = {}

    def push(self, shown: Mapping[str, Any]) -> None:
        """Give ``used`` the values of ``shown``."""
        for key, value in options(shown):
            if not isinstance(value, torch.Tensor):
                self._used[key] = value
                self._pushed[key] = self._left[key] = value, None
                continue
            if not _is_same(self._pushed.get(key), value):
                self._used[key] = value.detach().clone()
            self._pushed[key] = _stamp(value)
            self._left[key] = _stamp(self._used[key])

    def changed(self) -> dict[str, Any]:
        """Return the options that the optimizer has set to other values since :meth:`push`, or has
        added.
        """
        return {
            key: value
            for key, value in options(self._used)
            if not _is_same(self._left.get(key), value)
        }


def options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each option of ``group``."""
    return ((key, value) for key, value in group.items() if key not in PARAMETERS)


def merge(found: dict[str, Any], changed: Mapping[str, Any], kind: str) -> None:
    """Add the options that an optimizer, of class ``kind``, has ``changed`` to those ``found`` of
    other tensors of the group.

    Raises :class:`ConfigError` if they differ: the class has computed an option from all tensors
    that it saw.
    """
    for key, value in changed.items():
        if key in found and not is_equal(found[key], value):
            raise ConfigError(
                f"{kind} has computed its option {key!r} from the tensors that it steps: it is"
                f" {_text(found[key])} of one and {_text(value)} of another tensor, and would be"
                " another value if it saw all of them. Use bmt.optim.whole(..., together=True):"
                " then one rank steps all tensors."
            )
        found[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values of an option are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(
            torch.allclose(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)
        )
    return type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))


def _stamp(value: Any) -> tuple[Any, int | None]:
    return value, version_of(value) if isinstance(value, torch.Tensor) else None


def _is_same(stamp: tuple[Any, int | None] | None, value: Any) -> bool:
    if stamp is None:
        return False
    if isinstance(value, torch.Tensor) or isinstance(stamp[0], torch.Tensor):
        return stamp[0] is value and stamp[1] == version_of(value)
    return is_equal(stamp[0], value)


def _text(value: Any) -> str:
    return (
        f"{value.item():g}"
        if isinstance(value, torch.Tensor) and value.numel() == 1
        else str(value)
    )
