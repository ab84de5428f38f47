"""Tensors that consist of other tensors, such as torchao's states of 8 bits, which are codes and
scales of blocks.

Their classes have torch's methods ``__tensor_flatten__`` and ``__tensor_unflatten__``. In a state
that is saved whole, a dict stands for such a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

_CLASS = "tensor class"
_KEYS = {_CLASS, "tensors", "context", "shape", "stride"}


def in_parts(value: Any) -> Any:
    """Return a copy of ``value``, of a state, with a dict of its tensors in place of each tensor
    that consists of others.
    """
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return {
            _CLASS: type(value),
            "tensors": {name: in_parts(getattr(value, name)) for name in names},
            "context": context,
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
    return _mapped(value, in_parts)


def composed(value: Any) -> Any:
    """Return a copy of ``value`` with the tensors of which :func:`in_parts` has made dicts."""
    if type(value) is dict and value.keys() == _KEYS:
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        tensors = composed(value["tensors"])
        return value[_CLASS].__tensor_unflatten__(tensors, value["context"], shape, stride)
    return _mapped(value, composed)


def _mapped(value: Any, change: Any) -> Any:
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
