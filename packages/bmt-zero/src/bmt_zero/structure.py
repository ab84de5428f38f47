"""A number that changes when any module anywhere is given a parameter, a submodule, or a buffer that is new or on another device.

A block compares it before each call: as long as it stands still nothing was added or replaced, at no cost that grows
with the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module

from bmt_core.errors import ConfigError
from bmt_core.modules.outermost_call import is_gathered
from bmt_core.run.runtime import current, is_initialized
from bmt_zero.flat import FlatShard


class _Watch:
    epoch = 0
    installed = False


def structure_epoch() -> int:
    """Return the present number."""
    return _Watch.epoch


def watch_structure() -> None:
    """Start counting, once in a process."""
    if not _Watch.installed:
        _Watch.installed = True
        torch_module.register_module_parameter_registration_hook(_changed)
        torch_module.register_module_module_registration_hook(_changed)
        torch_module.register_module_buffer_registration_hook(_buffer_changed)


running: list[list[FlatShard]] = []
"""The flat shards of the blocks that are inside their forward."""


def _changed(module: Any, name: str, value: Any) -> None:
    _Watch.epoch += 1
    _check(module, name, value)


def _buffer_changed(module: Any, name: str, value: torch.Tensor | None) -> None:
    # Another one where the others are needs nothing done, and many a forward replaces its buffers.
    if name not in module._buffers or not (value is None or (is_initialized() and value.device == current().device)):
        _Watch.epoch += 1
    _check(module, name, value)


def _check(module: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and _has_memory(value) and _is_gathered_parameter(value):
        raise ConfigError(
            f"{type(module).__name__} was given a gathered parameter as its own {name!r}: it would be a new leaf, without"
            " gradient. A slice of an nn.ParameterList does that: index it, or loop over its indices."
        )


def _has_memory(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not torch.nn.parameter.is_lazy(value)


def _is_gathered_parameter(value: torch.Tensor) -> bool:
    return is_gathered(value) or any(flat.is_view(value) for flats in running for flat in flats)
