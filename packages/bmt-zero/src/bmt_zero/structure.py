"""A number that changes when any module anywhere is given a parameter or a submodule.

A block compares it before each call: as long as it stands still nothing was added or replaced, at no cost that grows
with the model.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module


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


def _changed(module: Any, name: str, value: Any) -> None:
    _Watch.epoch += 1
