"""Optimizers by name, through the registry."""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.plugins import Registry
from bmt_core.run.runtime import current, is_initialized


def create(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return a new optimizer over ``params``, of the class that an installed package offers as ``name``.

    ``options`` are passed to its constructor. Raises :class:`PluginError` for an unknown name. Works before
    ``init_distributed()`` too.

    >>> create("adam", [torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]["lr"]
    0.1
    """
    made: torch.optim.Optimizer = _registry().find("optimizer", name)(params, **options)
    return made


def available() -> list[str]:
    """Return the names that :func:`create` knows, sorted.

    >>> "adam" in available()
    True
    """
    return sorted(_registry().optimizers)


def _registry() -> Registry:
    return current().registry if is_initialized() else Registry.load()
