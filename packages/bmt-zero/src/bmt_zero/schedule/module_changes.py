"""``ModuleChanges``: counts how often a parameter, a submodule, or a new buffer was set on any module in the process.

A block compares the count before each call: if it is unchanged, nothing was added or replaced. This costs the same for every size
of model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from bmt_core.errors import ConfigError
from bmt_zero import adapters


class ModuleChanges:
    """Counts from its construction until :meth:`close`.

    ``is_gathered(tensor)`` says whether a tensor is a gathered parameter; setting one as a module's own parameter is an error.
    """

    def __init__(self, device: torch.device, is_gathered: Callable[[torch.Tensor], bool]) -> None:
        self.count = 0
        self._device = device
        self._is_gathered = is_gathered
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._changed),
            torch_module.register_module_module_registration_hook(self._module_changed),
            torch_module.register_module_buffer_registration_hook(self._buffer_changed),
        ]

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def _changed(self, module: Any, name: str, value: Any) -> None:
        self.count += 1
        self._check(module, name, value)

    def _module_changed(self, module: Any, name: str, value: nn.Module | None) -> None:
        self.count += 1
        adapters.added(module, value)

    def _buffer_changed(self, module: Any, name: str, value: torch.Tensor | None) -> None:
        # Many forwards replace a buffer by another on the same device, which changes nothing for the block.
        if name not in module._buffers or (value is not None and value.device != self._device):
            self.count += 1
        self._check(module, name, value)

    def _check(self, module: Any, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and _has_memory(value) and self._is_gathered(value):
            raise ConfigError(
                f"{type(module).__name__} was given a gathered parameter as its own {name!r}. It would be a new leaf, and the"
                " sharded parameter no gradient. Slicing an nn.ParameterList does that: index it, or loop over its indices."
            )


def _has_memory(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not torch.nn.parameter.is_lazy(value)
