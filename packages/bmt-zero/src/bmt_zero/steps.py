"""Tell flat shards that an optimizer stepped their parameters.

Version counters alone would not do: a rank whose part of a block is empty sees none of them move when the optimizer
passes over empty tensors, and ranks would disagree about gathering again. That an optimizer stepped is the same on
every rank.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bmt_core.params.parameter import DistributedParameter, reduce_held_back


class _Watch:
    installed = False


def watch_steps() -> None:
    """Start telling, once in a process."""
    if not _Watch.installed:
        _Watch.installed = True
        register_optimizer_step_pre_hook(_steps)
        register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    reduce_held_back(parameter for group in optimizer.param_groups for parameter in group["params"])


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owners = {
        parameter.owner_reference
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, DistributedParameter) and parameter.grad is not None
    }
    for reference in owners:
        owner = reference() if reference is not None else None
        if owner is not None:
            owner.note_update()
