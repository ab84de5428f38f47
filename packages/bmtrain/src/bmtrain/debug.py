"""A dictionary for debugging: store values in one place of a program and read them in another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_values: dict[str, Any] = {}


def clear(key: str | None = None) -> None:
    """Forget ``key``, or everything."""
    if key is None:
        _values.clear()
    else:
        _values.pop(key, None)


def set(key: str, value: Any) -> None:
    """Keep ``value`` as ``key``."""
    _values[key] = value


def get(key: str, default: Any = None) -> Any:
    """Return what is kept as ``key``, or ``default``."""
    return _values.get(key, default)


def append(key: str, value: Any) -> None:
    """Append ``value`` to the list ``key``, which begins empty."""
    _values.setdefault(key, []).append(value)


def extend(key: str, values: Iterable[Any]) -> None:
    """Append all ``values`` to the list ``key``, which begins empty."""
    _values.setdefault(key, []).extend(values)
