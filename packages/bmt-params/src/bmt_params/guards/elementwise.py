"""Optimizers that would train another model on slices of parameters, because their update is
not elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bmt_core.errors import ConfigError
from bmt_core.run.rank_results import sum_loss
from bmt_core.run.runtime import Runtime, current, rank
from bmt_core.user_warnings import warn_user
from bmt_params.guards.optimizer_kind import OptimizerKind, kinds_of_groups
from bmt_params.guards.plain_loop_warnings import PlainLoops
from bmt_params.parameter import DistributedParameter

# The sizes of their groups when they were checked, and the groups whose empty parameters fail.
_steppable: WeakKeyDictionary[Any, tuple[list[int], list[int]]] = WeakKeyDictionary()
_warned_of: WeakSet[Any] = WeakSet()
_replaced: WeakSet[Any] = WeakSet()


def check_steps(runtime: Runtime) -> None:
    """Check the optimizer before every step until shutdown, also in a loop without a manager."""
    hook = register_optimizer_step_pre_hook(_before_step)
    runtime.at_shutdown.append(hook.remove)


def check_elementwise(optimizer: Any, *, has_closure: bool = False) -> None:
    """Raise :class:`ConfigError` if ``optimizer`` would train another model on what this rank has
    of its parameters.

    What an optimizer needs is declared, or found out when it is first seen with distributed
    parameters: see :func:`kinds_of_groups`. One that needs whole tensors may have them where each
    rank has every value, in 1-D if that does not matter to it. If nothing can be found out, a
    warning says so, once.
    """
    groups = _distributed(optimizer)
    if not groups:
        return
    distributed = [p for group in groups for p in group]
    kinds = kinds_of_groups(optimizer, has_closure=has_closure)
    for kind, own, group in zip(kinds, groups, optimizer.param_groups, strict=True):
        # Stages of a pipeline have other parameters in a group: where it is empty, they are judged
        # by those of other groups.
        if not _can_train(kind, own or ([] if group["params"] else distributed)):
            raise _refusal(optimizer, kind)
        if kind.needs == "unknown" and optimizer not in _warned_of:
            _warn(optimizer, kind)
    if all(kind.needs in ("elements", "unknown") for kind in kinds):
        failing = [number for number, kind in enumerate(kinds) if kind.fails_on_empty]
        _steppable[optimizer] = _sizes_of_groups(optimizer), failing


def note_replaced(optimizer: Any) -> None:
    """Do not check ``optimizer`` before its steps any more: another steps in its place, and its own
    ``step`` raises.
    """
    _replaced.add(optimizer)


def need_of_whole_tensors(optimizer: Any) -> str | None:
    """Return why ``optimizer`` needs whole tensors of which this rank has parts, each for itself;
    None if it does not, or needs all tensors at once.

    See :func:`kinds_of_groups`; ranks may have different groups.
    """
    if not _distributed(optimizer):
        return None
    kinds = kinds_of_groups(optimizer)
    if any(kind.needs == "all tensors" for kind in kinds):
        return None
    return next((kind.reason for kind in kinds if kind.needs == "tensors"), None)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    arguments = _check_step(optimizer, args, kwargs)
    loops = current().state(PlainLoops)
    if not loops.are_checked:
        loops.check(optimizer)
    return arguments


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check ``optimizer`` before ``step(*args, **kwargs)``, of which ``args[0]`` is itself; return
    the arguments in place of these, or None.
    """
    if optimizer in _replaced:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if _steppable.get(optimizer, (None,))[0] != _sizes_of_groups(optimizer):
        check_elementwise(optimizer, has_closure=closure is not None)
    if optimizer not in _steppable:
        # A step of whole parameters may depend on the loss: see _loss_of_all().
        if closure is None or current().topology.sum_size == 1 or not _distributed(optimizer):
            return None
        of_all = partial(_loss_of_all, closure)
        if len(args) > 1:
            return (args[0], of_all, *args[2:]), kwargs
        return args, {**kwargs, "closure": of_all}
    for index in _steppable[optimizer][1]:  # as without a gradient, in which there is nothing
        for p in optimizer.param_groups[index]["params"]:
            if not p.numel():
                p.grad = None
    return None


def _loss_of_all(closure: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the loss of ``closure`` over all ranks, of which gradients that ranks have summed are
    the derivative: a step that chooses its size by losses must choose it alike on all ranks.
    """
    group, divisor = current().topology.sum_group, current().gradient_divisor
    loss = torch.as_tensor(closure(*args, **kwargs)).detach()
    # sum_loss() returns the mean; gradients are sums that are divided by the divisor.
    return sum_loss(loss.to(current().device), group) * (group.size / divisor)


def _distributed(optimizer: Any) -> list[list[DistributedParameter]]:
    """Return the distributed parameters of each group; an empty list if there are none."""
    groups = [
        [p for p in group["params"] if isinstance(p, DistributedParameter)]
        for group in optimizer.param_groups
    ]
    return groups if any(groups) else []


def _sizes_of_groups(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _can_train(kind: OptimizerKind, parameters: Sequence[DistributedParameter]) -> bool:
    if kind.needs in ("elements", "unknown"):
        return True
    return not any(p.is_part or (kind.needs_shape and p.shape != p.whole_shape) for p in parameters)


def _refusal(optimizer: Any, kind: OptimizerKind) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name} cannot train sharded parameters, of which each rank has a 1-D slice:"
        f" {kind.reason}. {_remedy(name, kind)} (AdamW, say), or keep these parameters out of"
        " Blocks and wrappers. If this optimizer does see whole parameters"
        " (DistributedParameter.gather), say bmt_elementwise = True in its class or in its"
        " parameter groups."
    )


def _remedy(name: str, kind: OptimizerKind) -> str:
    if kind.needs_closure:
        return (
            "It also needs a closure, and so cannot step whole tensors. Give every rank all values"
            " (zero_level=0), or take another optimizer"
        )
    if kind.needs == "all tensors":
        return (
            f"Have one rank step all of them: bmt.optim.whole({name}, params, …, together=True)."
            " Or take an elementwise optimizer"
        )
    return (
        f"Have it step whole tensors: bmt.optim.whole({name}, params, …), or, if there are none of"
        " its states yet, OptimManager.add_optimizer(optimizer). Or take an elementwise optimizer"
    )


def _warn(optimizer: Any, kind: OptimizerKind) -> None:
    _warned_of.add(optimizer)
    if rank() == 0:
        warn_user(
            f"{type(optimizer).__name__} trains sharded parameters, of which each rank has a 1-D"
            " slice, and whether it trains them as it would train whole ones could not be found"
            f" out: {kind.reason}. Say bmt_elementwise = True, or False, in its class or in its"
            " parameter groups. This is said once."
        )
