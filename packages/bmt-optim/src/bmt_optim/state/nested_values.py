"""Values of a parameter's state that have tensors in lists, tuples or dicts, such as SOAP's
projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bmt_params.state.state_tensors import StoredTensor


@dataclass(frozen=True)
class _Slot:
    """Stands for the tensor ``key`` of the flattened state, inside of another value."""

    key: str


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with every tensor in a list, tuple or dict as a value of its own.

    >>> sorted(flattened({"factors": [torch.zeros(2), {"right": torch.zeros(3)}], "step": 1}))
    ['factors', 'factors[0]', 'factors[1][right]', 'step']
    """
    flat: dict[str, Any] = {}

    def with_slot(key: str, tensor: Any) -> _Slot:
        flat[key] = tensor
        return _Slot(key)

    for key, value in state.items():
        flat[key] = value if _is_tensor(value) else _mapped(key, value, _is_tensor, with_slot)
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of which ``flat`` has the values of :func:`flattened`, or others in
    their places.
    """
    in_slots: set[str] = set()

    def value_of(_: str, slot: _Slot) -> Any:
        in_slots.add(slot.key)
        return flat[slot.key]

    filled = {
        key: _mapped(key, value, lambda item: isinstance(item, _Slot), value_of)
        for key, value in flat.items()
    }
    return {key: value for key, value in filled.items() if key not in in_slots}


def with_each_tensor(
    key: str, value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> Any:
    """Return a copy of ``value``, of a state's ``key``, with ``change(path, tensor)`` in place of
    each tensor.
    """
    return _mapped(key, value, _is_tensor, change)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, StoredTensor))


def _mapped(
    path: str, value: Any, is_changed: Callable[[Any], bool], change: Callable[[str, Any], Any]
) -> Any:
    """Return ``value`` with ``change(path, item)`` in place of the items to be changed. Containers
    of other classes are left alone.
    """
    if is_changed(value):
        return change(path, value)
    if type(value) is dict:
        return {
            key: _mapped(f"{path}[{key}]", item, is_changed, change) for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(
            [_mapped(f"{path}[{i}]", item, is_changed, change) for i, item in enumerate(value)]
        )
    return value
