"""A new optimizer of the class and the options of a given one, over other parameters."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

_NOT_COPIED = {"params", "param_names", "initial_lr"}
_SMALL_LR = 1e-3


class CannotCopyError(Exception):
    """An optimizer like the given one cannot be made; the text says why."""


def twin_of(optimizer: Any, index: int, params: Sequence[torch.Tensor]) -> Any:
    """Return an optimizer like ``optimizer`` that has one group: ``params``, with the options of
    its group ``index``.

    Options are those of now, but a learning rate of 0, as warm-up begins with, is replaced. The
    constructor is called with what the group, ``defaults`` and attributes of the same names say. If
    it cannot be, the attributes are copied. ``optimizer`` is only read; nothing that the new one
    has is shared with it. Raises :class:`CannotCopyError`.
    """
    failures = []
    for make in (_constructed, _copied_bare):
        try:
            made = make(optimizer, index, params)
        except Exception as error:  # of a constructor of anyone's
            failures.append(f"{type(error).__name__}: {error}")
            continue
        # Those that average weights step only in this mode.
        if callable(getattr(made, "train", None)):
            made.train()
        return made
    raise CannotCopyError(failures[0])


def _group_like(optimizer: Any, index: int, params: Sequence[torch.Tensor]) -> dict[str, Any]:
    group = optimizer.param_groups[index]
    options = {key: copied(value) for key, value in group.items() if key not in _NOT_COPIED}
    lr = options.get("lr")
    if isinstance(lr, (int, float, torch.Tensor)) and not float(lr):
        given = [group.get("initial_lr"), optimizer.defaults.get("lr"), _SMALL_LR]
        rate = next(float(value) for value in given if value is not None and float(value))
        options["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
    return {**options, "params": list(params)}


def _constructed(optimizer: Any, index: int, params: Sequence[torch.Tensor]) -> Any:
    """Call the constructor of ``optimizer``'s class with its options, as far as they can
    be read.
    """
    arguments: dict[str, Any] = {}
    is_complete, has_params = True, False
    for parameter in inspect.signature(type(optimizer)).parameters.values():
        name = parameter.name
        kept = getattr(optimizer, name, None)
        if name == "params":
            arguments[name], has_params = [_group_like(optimizer, index, params)], True
        elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            is_complete = False
        elif isinstance(kept, Optimizer):
            # Beside the parameters, a constructor wants the class of an optimizer that it
            # makes itself.
            arguments[name] = type(kept) if has_params else twin_of(kept, index, params)
            has_params = True
        elif name in optimizer.defaults:
            arguments[name] = copied(optimizer.defaults[name])
        elif hasattr(optimizer, name) and not inspect.isroutine(kept):
            arguments[name] = copied(kept)
        elif parameter.default is parameter.empty:
            raise CannotCopyError(f"its constructor needs {name}, which it does not keep")
        else:
            is_complete = False
    if not has_params:
        raise CannotCopyError("its constructor takes no params")
    made = type(optimizer)(**arguments)
    if not is_complete:
        _take_over_attributes(optimizer, made)
    return made


def _take_over_attributes(optimizer: Any, made: Any) -> None:
    """Copy plain attributes, in which a constructor keeps options under other names than those of
    its arguments.
    """
    for name, value in vars(optimizer).items():
        before = vars(made).get(name)
        is_option = name != "defaults" and not name.startswith("_")
        if is_option and _is_plain(value) and _is_plain(before):
            setattr(made, name, value)


def _copied_bare(optimizer: Any, index: int, params: Sequence[torch.Tensor]) -> Any:
    """Copy the attributes of ``optimizer`` to an object of its class, without its constructor, its
    state and its hooks.
    """
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "param_groups":
            made.param_groups = [_group_like(optimizer, index, params)]
        elif name == "state":
            made.state = defaultdict(dict)
        # Hooks, which were registered for the given optimizer.
        elif name.startswith("_optimizer_"):
            vars(made)[name] = OrderedDict()
        elif isinstance(value, Optimizer):
            vars(made)[name] = twin_of(value, index, params)
        # A scheduler counts steps by a function in its place, which would step the given optimizer.
        elif name != "step":
            vars(made)[name] = copied(value)
    return made


def copied(value: Any) -> Any:
    """Return a copy of ``value`` that shares nothing which a step could change; CannotCopyError if
    it may hold parameters.

    >>> copied({"betas": [0.9, 0.99]})
    {'betas': [0.9, 0.99]}
    """
    if _is_plain(value) or isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() > 1:
            raise CannotCopyError(
                f"it keeps a tensor of shape {tuple(value.shape)} beside its state"
            )
        return value.detach().clone()
    if isinstance(value, dict):
        made = value.copy()
        made.clear()
        made.update({key: copied(item) for key, item in value.items()})
        return made
    if isinstance(value, (list, set, tuple)) and not hasattr(value, "_fields"):
        return type(value)([copied(item) for item in value])
    if isinstance(value, (torch.nn.Module, Optimizer)) or not hasattr(value, "__dict__"):
        raise CannotCopyError(f"it keeps a {type(value).__name__}")
    made = object.__new__(type(value))
    vars(made).update({key: copied(item) for key, item in vars(value).items()})
    return made


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(_is_plain(item) for item in value)
    return isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
    )
