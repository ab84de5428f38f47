"""The norm of gradients over all ranks, and clipping by it, without reading a value on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from bmt_core.torch_internals import without_torch_functions
from bmt_optim.current_run import kernels_for, replicas, world


def clip(
    parameters: Sequence[torch.nn.Parameter],
    max_norm: float,
    p: float,
    eps: float,
    device: torch.device,
    scaling: Callable[[torch.Tensor], AbstractContextManager[object]],
) -> torch.Tensor:
    """Multiply the gradients of ``parameters`` by ``max_norm / (N + eps)`` if that is below 1, and
    return N. Collective.

    N is a 0-dim float32 tensor on ``device``. If it is not finite (which finite gradients can cause
    too, if their squares add up to infinity), the gradients become NaN: gradients multiplied by 0
    would be taken for a valid step. They are multiplied inside ``scaling(factor)``.
    """
    with without_torch_functions():
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
    weights = [1.0 / replicas(parameter) for parameter in trained]
    kernels = kernels_for(grads, device)
    norm = _over_all_ranks(kernels.powers_sum(grads, p, weights, device), p)
    factor = (max_norm / (norm + eps)).clamp(max=1.0)
    factor = factor.masked_fill(~norm.isfinite(), math.nan)
    with scaling(factor):
        kernels.scale_(grads, factor)
    return norm


def _over_all_ranks(local: torch.Tensor, p: float) -> torch.Tensor:
    if p == math.inf:
        # Backends differ in the maximum of NaN and a number.
        largest = local.nan_to_num(nan=math.inf, posinf=math.inf)
        world().all_reduce(largest, "max").wait()
        return largest
    world().all_reduce(local).wait()
    return local.pow(1.0 / p)


def parameters_in(param_groups: Iterable[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters in ``param_groups``: parameters, or one or several groups of
    an optimizer.
    """
    if isinstance(param_groups, torch.Tensor):
        return [param_groups]  # type: ignore[list-item]
    found: list[Any] = []
    is_one = isinstance(param_groups, Mapping) or not isinstance(param_groups, Iterable)
    for item in [param_groups] if is_one else param_groups:
        found.extend(item["params"] if isinstance(item, Mapping) else [item])
    for p in found:
        if not isinstance(p, torch.Tensor):
            raise TypeError(
                "param_groups must be parameters, such as model.parameters(), or groups, such as"
                f" optimizer.param_groups, and not {type(p).__name__}."
            )
    return found
