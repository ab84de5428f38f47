"""Tools for debugging: where a value is not finite, and a dictionary to store values in one place
of a program and read them in another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from bmtrain._inspect.non_finite import NonFiniteSearch

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


def find_non_finite(model: nn.Module) -> NonFiniteSearch:
    """Return a context manager that finds out where in a step a value becomes infinite or NaN.

    Inside, it looks at the inputs and outputs of every module of ``model`` and at their gradients,
    and at the end at the gradients of all parameters. If something is not finite it raises
    :class:`BmtError` on every rank, which names the rank, the moment (parameters before the step,
    forward, backward, gradients), the module and the number of elements::

        with bmt.debug.find_non_finite(model):
            loss = model(batch)
            manager.backward(loss)

    If the code inside raises, what this rank has found is added to that error as a note. A compiled
    Block is looked at from outside. Every look waits for the device, so use it to repeat a step
    that went wrong, from its checkpoint, and not in training. Outside of it nothing is slower.
    Collective: all ranks enter and leave it.
    """
    from bmtrain._inspect.non_finite import NonFiniteSearch

    return NonFiniteSearch(model)
