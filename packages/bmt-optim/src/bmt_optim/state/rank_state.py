"""The optimizer state of one rank: its own parts, which load on the same rank of a run of the
same size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import rank
from bmt_optim.managed_optimizer import ManagedOptimizer
from bmt_optim.state.torch_state import (
    REMEDY,
    check_rank,
    check_torch_state,
    check_value_shapes,
    this_rank,
    value_shapes,
    with_all_options,
)


def rank_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the states of ``optimizers`` on this rank, and the shapes and numbers that
    :func:`check_rank_state` compares.
    """
    states = [optimizer.state_dict() for optimizer in optimizers]
    return {
        "optimizers": states,
        "shapes": [_shapes(optimizer) for optimizer in optimizers],
        "value_shapes": [value_shapes(state) for state in states],
        **this_rank(),
    }


def check_rank_state(
    optimizers: Sequence[torch.optim.Optimizer],
    adapted: Sequence[ManagedOptimizer],
    state: Mapping[str, Any],
) -> None:
    """Raise :class:`CheckpointError` unless ``state`` is that of this rank, at this world size, of
    parameters of these shapes.

    ``adapted`` are the same optimizers. Rank and world size are compared only if the state has
    them: BMTrain's have none.
    """
    check_rank(state)
    for number, (optimizer, shapes) in enumerate(
        zip(optimizers, state.get("shapes", ()), strict=False)
    ):
        if shapes != _shapes(optimizer):
            raise CheckpointError(
                f"The state of optimizer {number} is of parameters of other shapes than on rank"
                f" {rank()} now. It belongs to another model or grid. {REMEDY}"
            )
    if len(state["optimizers"]) != len(optimizers):
        raise CheckpointError(
            f"The state is of {len(state['optimizers'])} optimizers, this manager has"
            f" {len(optimizers)}."
        )
    for optimizer, managed, saved in zip(optimizers, adapted, state["optimizers"], strict=True):
        # Any other may have a state of its own form.
        if isinstance(optimizer, torch.optim.Optimizer):
            check_torch_state(managed, saved, is_own="shapes" in state)
    for number, (saved, shapes) in enumerate(
        zip(state["optimizers"], state.get("value_shapes", ()), strict=False)
    ):
        check_value_shapes(value_shapes(saved), shapes, f"of optimizer {number}, parameter ")


def load_rank_state(
    optimizers: Sequence[torch.optim.Optimizer],
    adapted: Sequence[ManagedOptimizer],
    state: Mapping[str, Any],
) -> None:
    """Load the state that :func:`rank_state` returned, exact in every bit."""
    for optimizer, managed, saved in zip(optimizers, adapted, state["optimizers"], strict=True):
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.load_state_dict(with_all_options(managed, saved))
            _undo_rounding(optimizer, saved, managed.rounds_moments)
        else:
            optimizer.load_state_dict(saved)


def _undo_rounding(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rounds_moments: bool
) -> None:
    # torch rounds state to the dtype of the parameter, and state that it need not round shares the
    # saved state's memory.
    params = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for p, index in zip(params, indices, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            now = optimizer.state[p].get(key)
            if not isinstance(now, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            is_rounded = value.is_floating_point() and value.element_size() > now.element_size()
            is_rounded &= not (rounds_moments and now.shape == p.shape)
            if is_rounded or now.data_ptr() == value.data_ptr():
                optimizer.state[p][key] = value.detach().to(now.device, copy=True)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
