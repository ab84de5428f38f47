"""Blank tensors: parameters and buffers that have memory and no values yet, because they were made on the meta device.

[Note: blanks] A blank is filled with NaN, so that what is forgotten shows in the first loss, and marked with its
version, so that it is known before: whatever writes to it (initialisation, a checkpoint, the user) moves the version.
Every rank writes alike, so every rank gives the same answer, also one whose part is empty; values would not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from bmt_core.errors import ConfigError

_MARK: Final = "_bmt_blank"


def mark_blank(tensor: torch.Tensor) -> None:
    """Say that ``tensor`` has no values, until something is written to it."""
    with torch.no_grad():
        poison(tensor)
    setattr(tensor, _MARK, tensor._version)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether something was written to ``tensor`` since it was marked, if it was."""
    if tensor.is_meta:
        return tensor.numel() == 0
    mark = getattr(tensor, _MARK, None)
    return mark is None or mark != tensor._version


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` with NaN, or with zero where its dtype has none that can be found again, and return it."""
    return tensor.fill_(float("nan")) if knows_nan(tensor) else tensor.zero_()


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether NaN is left in ``tensor``. Looks at values: waits for the device."""
    if not knows_nan(tensor) or tensor.numel() == 0:
        return False
    # Both ends of the range are NaN if any element is; unlike isnan() this makes no tensor of the same size.
    return bool(torch.isnan(tensor).any() if tensor.is_complex() else tensor.amax().isnan())


def knows_nan(tensor: torch.Tensor) -> bool:
    """Whether :func:`is_poisoned` can tell for the dtype of ``tensor``."""
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def blank_whole(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole of a blank parameter: a meta tensor while a model is made on the meta device, else an error."""
    if is_meta_default():
        return torch.empty(shape, dtype=dtype)
    raise ConfigError(
        f"A parameter of shape {tuple(shape)} has no values: it was made on the meta device."
        " Call init_parameters(model) or load a checkpoint before it is read."
    )


def is_meta_default() -> bool:
    """Whether tensors are made on the meta device at the moment."""
    return torch.get_default_device().type == "meta"


def off_meta() -> AbstractContextManager[object]:
    """Inside, tensors are not made on the meta device because the user's code around makes its own there."""
    return torch.device("cpu") if is_meta_default() else nullcontext()


def place_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the buffers of ``modules`` to ``device``; those on the meta device get memory there, and stay blank."""
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one, whose id must not be used again
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in placed:
                    placed[id(buffer)] = buffer, _placed(buffer, device)
                module._buffers[name] = placed[id(buffer)][1]


def settle_buffer(buffer: torch.Tensor) -> None:
    """Decide by its values whether ``buffer``, which may have been written to in part, is still blank."""
    if hasattr(buffer, _MARK) and knows_nan(buffer):
        if is_poisoned(buffer):
            setattr(buffer, _MARK, buffer._version)
        else:
            delattr(buffer, _MARK)


def blank_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that have no values."""
    return [name for name, parameter in module.named_parameters() if not has_values(parameter)]


def blank_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that have no values."""
    return [name for name, buffer in module.named_buffers() if not has_values(buffer)]


def watch_for_values(module: nn.Module) -> None:
    """Let :func:`require_values` look at ``module`` before it is called, if anything in it is blank now."""
    if blank_parameters(module) or blank_buffers(module):
        module.__dict__[_MARK] = True


def require_values(module: nn.Module) -> None:
    """Raise :class:`ConfigError` if something in ``module``, which :func:`watch_for_values` saw, has no values yet."""
    parameters, buffers = blank_parameters(module), blank_buffers(module)
    if parameters or buffers:
        raise ConfigError(
            f"{named(parameters, buffers)} of {type(module).__name__} have no values: they were made on the meta device."
            " Call init_parameters(model) or load a checkpoint before the model is used."
        )
    del module.__dict__[_MARK]


def is_watched(module: nn.Module) -> bool:
    """Whether :func:`require_values` has yet to find ``module`` complete."""
    return _MARK in module.__dict__


def named(parameters: Sequence[str], buffers: Sequence[str]) -> str:
    """Name parameters and buffers in a sentence.

    >>> named(["a.weight", "a.bias"], ["b.mask"])
    'Parameters a.weight, a.bias and buffers b.mask'
    """
    listed = [
        f"{kind} {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for kind, names in (("parameters", parameters), ("buffers", buffers))
        if names
    ]
    text = " and ".join(listed)
    return text[:1].upper() + text[1:]


_SHOWN = 6


def _placed(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not buffer.is_meta:
        return buffer.to(device)
    made: Any = torch.empty_like(buffer, device=device)
    mark_blank(made)
    return made  # type: ignore[no-any-return]
