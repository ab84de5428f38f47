"""Parameters and buffers made on the meta device, by a program or by layers of bmt that leave their
values to ``init_parameters``: they have memory, and no values until something initialises them.

[Note: uninitialized tensors] A tensor without values is filled with NaN, so that a forgotten one
shows in the first loss. Its ``_version``, torch's count of writes, is remembered: the tensor has
values once the count has changed. Every rank makes the same writes, so all ranks agree, even one
whose part is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.run.topology import DATA_AXIS, REPLICA_AXIS
from bmt_core.torch_internals import version_of
from bmt_params.guards.first_values import FirstValues

UNINITIALIZED: Final = "_bmt_uninitialized"
"""An attribute: of a tensor that is marked, with its version then; of a module whose next call asks
:func:`require_values`, with True.
"""


def mark_uninitialized(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with NaN, and let :func:`has_values` be False until something is written
    to it.
    """
    with torch.no_grad():
        fill_with_nan(tensor)
    # After the fill, which counts as a write.
    setattr(tensor, UNINITIALIZED, version_of(tensor))


def has_values(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is off the meta device and, if it was marked as uninitialised, was written
    to since.
    """
    if tensor.is_meta:
        # No values are missing in an empty one.
        return tensor.numel() == 0
    mark = getattr(tensor, UNINITIALIZED, None)
    if mark is None or mark == version_of(tensor):
        return mark is None
    delattr(tensor, UNINITIALIZED)  # copies would inherit the mark, and count their versions anew
    return True


def note_first_buffers(modules: Iterable[nn.Module]) -> None:
    """Note the values of the buffers of ``modules``, so that the first call finds out if
    data-parallel ranks begin with others.
    """
    run = current()
    group = run.topology.group((DATA_AXIS.name, REPLICA_AXIS.name))
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                label = f"the buffer {type(module).__name__}.{name}"
                run.state(FirstValues).note(
                    buffer, buffer, group, is_filled=has_values(buffer), name=label
                )


def fill_with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` with NaN, or with zero if :func:`can_hold_nan` is False, and return it."""
    return tensor.fill_(float("nan")) if can_hold_nan(tensor) else tensor.zero_()


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether an element of ``tensor`` is NaN. Waits for the device."""
    if not can_hold_nan(tensor) or tensor.numel() == 0:
        return False
    # The maximum is NaN if any element is; unlike isnan() this makes no tensor of the same size.
    return bool(torch.isnan(tensor).any() if tensor.is_complex() else tensor.amax().isnan())


def can_hold_nan(tensor: torch.Tensor) -> bool:
    """Whether the dtype of ``tensor`` has a NaN that torch can compute with; float8 types
    do not.
    """
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def read_uninitialized(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor for an uninitialised parameter under ``torch.device("meta")``; raise
    :class:`ConfigError` elsewhere.
    """
    if _meta_is_default():
        return torch.empty(shape, dtype=dtype, device="meta")
    raise ConfigError(
        f"A parameter of shape {tuple(shape)} has no values: it was made on the meta device, or by"
        " a layer that leaves its values to init_parameters. Call init_parameters(model) or load a"
        " checkpoint before it is read."
    )


def off_meta_device() -> AbstractContextManager[object]:
    """Inside, make tensors on the CPU if the default device is meta; another default
    device stays.
    """
    return torch.device("cpu") if _meta_is_default() else nullcontext()


def materialize_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the buffers of ``modules`` themselves to ``device``. Those on the meta device get
    memory, and no values.

    A buffer that several modules hold stays one tensor.
    """
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in moved:
                    moved[buffer] = (
                        torch.empty_like(buffer, device=device)
                        if buffer.is_meta
                        else buffer.to(device)
                    )
                    if buffer.is_meta:
                        mark_uninitialized(moved[buffer])
                module._buffers[name] = moved[buffer]


def mark_if_nan_is_left(buffer: torch.Tensor) -> None:
    """Mark ``buffer`` as uninitialised again if it was marked and only a part of it was written
    to since.
    """
    if hasattr(buffer, UNINITIALIZED) and has_nan(buffer):
        setattr(buffer, UNINITIALIZED, version_of(buffer))


def uninitialized_names(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the parameters and of the buffers in ``module`` that have no values."""
    parameters = [
        name for name, parameter in module.named_parameters() if not has_values(parameter)
    ]
    return parameters, [name for name, buffer in module.named_buffers() if not has_values(buffer)]


def check_values_at_first_call(module: nn.Module) -> None:
    """Let :func:`require_values` check ``module``, if anything in it has no values now."""
    if any(uninitialized_names(module)):
        module.__dict__[UNINITIALIZED] = True


def require_values(module: nn.Module) -> None:
    """Raise :class:`ConfigError` if something in ``module`` has no values; else it is not asked
    again.
    """
    parameters, buffers = uninitialized_names(module)
    if parameters or buffers:
        raise ConfigError(
            f"{list_names(parameters, buffers)} of {type(module).__name__} have no values: they"
            " were made on the meta device, or by a layer that leaves its values to"
            " init_parameters. Call init_parameters(model) or load a checkpoint before the model is"
            " used. Values that a program writes by itself must not go through .data, where bmt"
            " does not see them."
        )
    del module.__dict__[UNINITIALIZED]


def list_names(parameters: Sequence[str], buffers: Sequence[str]) -> str:
    """Return the beginning of a sentence about parameters and buffers.

    >>> list_names(["a.weight", "a.bias"], ["b.mask"])
    'Parameters a.weight, a.bias and buffers b.mask'
    """
    listed = [
        f"{kind} {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        for kind, names in (("parameters", parameters), ("buffers", buffers))
        if names
    ]
    text = " and ".join(listed)
    return text[:1].upper() + text[1:]


def _meta_is_default() -> bool:
    return torch.get_default_device().type == "meta"
