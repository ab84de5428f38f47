"""Tensors in a manager's state: ``TensorPart``, this rank's part of a tensor to save, and
``StoredTensor``, a tensor to load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.comm.protocols import Group

_REFERENCE = "bmt.tensor"


@dataclass(frozen=True)
class StateOwner:
    """The one rank of the world that has a parameter's state, among the ranks of ``group``, which
    share the parameter.
    """

    rank: int
    group: Group


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """This rank's part of a tensor that a checkpoint stores whole, under ``name``.

    The tensor has ``shape`` and ``dtype``, and is sharded like ``parameter``. If the parameter is
    distributed, ``value()`` returns the 1-D part that belongs to this rank's part of the parameter;
    otherwise the whole tensor, the same on every rank. With an ``owner`` the tensor may have any
    shape; the owner has all of it, and ``value()`` is called on that rank only.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parameter: torch.Tensor
    value: Callable[[], torch.Tensor]
    owner: StateOwner | None = None


@dataclass(frozen=True)
class TensorName:
    """Stands for a tensor of which this rank has no part. Another rank has a :class:`TensorPart` of
    this name.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor in an open checkpoint. ``read()`` returns it, on the CPU; nobody writes
    to it.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def parts_in(value: Any) -> Iterator[TensorPart]:
    """Yield every :class:`TensorPart` in the dicts, lists and tuples of ``value``."""
    if isinstance(value, TensorPart):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from parts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts_in(item)


def with_references(value: Any) -> Any:
    """Return a copy of ``value`` with the name of each :class:`TensorPart` or :class:`TensorName`
    in place of the object.
    """

    def reference(item: Any) -> Any:
        return {_REFERENCE: item.name} if isinstance(item, (TensorPart, TensorName)) else item

    return _mapped(value, reference)


def has_references(value: Any) -> bool:
    """Whether ``value``, which :func:`with_references` returned, names a tensor."""
    items = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return _is_reference(value) or any(has_references(item) for item in items)


def with_tensors(value: Any, tensor_called: Callable[[str], Any]) -> Any:
    """Return a copy of ``value`` with ``tensor_called(name)`` in place of each name that
    :func:`with_references` put there.
    """
    return _mapped(
        value, lambda item: tensor_called(item[_REFERENCE]) if _is_reference(item) else item
    )


def _is_reference(item: Any) -> bool:
    return (
        isinstance(item, Mapping)
        and item.keys() == {_REFERENCE}
        and isinstance(item[_REFERENCE], str)
    )


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, Mapping):
        mapped = {key: _mapped(item, change) for key, item in value.items()}
        # Torch's MultiStepLR needs its Counter.
        return Counter(mapped) if isinstance(value, Counter) else mapped
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return value
