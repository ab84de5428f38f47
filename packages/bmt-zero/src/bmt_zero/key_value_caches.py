"""Key-value caches among the arguments of a block, which forward changes and recomputation must not
change again.

A cache that Hugging Face's models pass from layer to layer is an object with ``get_seq_length()``
or, for linear attention, ``update_conv_state()``. A block appends its keys and values to it. If the
block were recomputed with the same object, it would find its own entries there. So recomputation
gets a copy of the cache as it was before forward. The copy shares the tensors, unless the cache
writes into them, which its ``is_compileable`` says; then they are copied too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from typing import Any

import torch
from torch import nn


def with_own_caches(arguments: Any) -> Any:
    """Return ``arguments`` with a copy in place of every cache. Containers without a cache are
    returned themselves.
    """
    if isinstance(arguments, (tuple, list)) and not hasattr(arguments, "_fields"):
        items = [with_own_caches(item) for item in arguments]
        return arguments if all(map(operator.is_, items, arguments)) else type(arguments)(items)
    if type(arguments) is dict:
        changed = {key: with_own_caches(value) for key, value in arguments.items()}
        return (
            arguments if all(map(operator.is_, changed.values(), arguments.values())) else changed
        )
    return _copied(arguments) if _is_cache(arguments) else arguments


def without_cache_in_recomputation(module: nn.Module) -> None:
    """Make ``module`` build no cache in training with blocks that recompute, unless the call
    passes ``use_cache``.

    A cache would keep the keys and values of every layer until backward: memory that recomputation
    is meant to save.
    """
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" in names and getattr(getattr(module, "config", None), "use_cache", False):
        module.register_forward_pre_hook(
            functools.partial(_no_cache, names.index("use_cache")), with_kwargs=True
        )


def _no_cache(
    position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    is_said = len(args) > position or kwargs.get("use_cache") is not None
    if is_said or not (module.training and torch.is_grad_enabled() and _recomputes(module)):
        return None
    return args, {**kwargs, "use_cache": False}


def _recomputes(module: nn.Module) -> bool:
    engines = (inner.__dict__.get("_bmt_block") for inner in module.modules())
    return any(engine is not None and engine.use_checkpoint for engine in engines)


def _is_cache(value: Any) -> bool:
    known = any(
        callable(getattr(value, name, None)) for name in ("get_seq_length", "update_conv_state")
    )
    return known and not isinstance(value, (torch.Tensor, nn.Module, type))


def _copied(value: Any, is_written: bool = False) -> Any:
    if _is_cache(value):
        copied = copy.copy(value)
        is_written = bool(getattr(value, "is_compileable", False))
        copied.__dict__.update(
            {name: _copied(held, is_written) for name, held in vars(value).items()}
        )
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(item, is_written) for item in value)
    if type(value) is dict:
        return {key: _copied(item, is_written) for key, item in value.items()}
    return value.clone() if is_written and isinstance(value, torch.Tensor) else value
