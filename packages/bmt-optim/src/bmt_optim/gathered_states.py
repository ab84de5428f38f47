"""Whole states of all optimizers of an ``OptimManager``, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bmt_optim.manager import OptimManager
from bmt_optim.state.logical_state import Named, State, gather, scatter


def gather_state(manager: OptimManager, named_parameters: Named | None = None) -> State:
    """Return name -> {key: whole tensor or number} on rank 0, and an empty dict elsewhere.
    Collective.

    Tensors go to rank 0's host memory one by one; no rank holds more than one whole tensor at a
    time on its device.
    """
    manager.read_outcome()
    return gather(manager._managed, named_parameters)


def scatter_state(
    manager: OptimManager, named_parameters: Named | None, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give each parameter's optimizer this rank's part of ``state``, from :func:`gather_state` at
    any world size. Collective.

    Either every rank passes the state (mapped from a file, say), or rank 0 alone does and the
    others an empty dict; then it is broadcast tensor by tensor. When names or shapes do not fit,
    every rank raises :class:`CheckpointError`, with nothing changed.
    """
    manager.read_outcome()
    scatter(manager._managed, named_parameters, state)
