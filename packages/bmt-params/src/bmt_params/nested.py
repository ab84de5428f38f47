"""Tensors inside arguments and results: tuples, lists, dicts, dataclasses, nested in any way."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it; containers keep their type.

    What holds no changed tensor is returned as it is. Objects of other classes are left alone.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {
            key: new for key, old in value.items() if (new := map_tensors(function, old)) is not old
        }
        return _with_items(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {
            name: new
            for name, old in fields.items()
            if (new := map_tensors(function, old)) is not old
        }
        return _with_fields(value, changed) if changed else value
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, in order.

    >>> [t.item() for t in tensors_in({"a": (torch.tensor(1), [torch.tensor(2)]), "b": "text"})]
    [1, 2]
    """
    found: list[torch.Tensor] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            # Reversed, because the last item is taken first.
            pending += reversed(item)
        elif isinstance(item, dict):
            pending += reversed([*item.values()])
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending += reversed([getattr(item, field.name) for field in dataclasses.fields(item)])
    return found


def _with_items(value: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    # A copy keeps the class and what else the object has.
    copied = copy.copy(value)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    copied = copy.copy(value)
    for name, item in changed.items():
        # setattr() of a frozen dataclass raises.
        object.__setattr__(copied, name, item)
    return copied
