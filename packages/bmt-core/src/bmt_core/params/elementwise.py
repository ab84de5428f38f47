"""Optimizers that would train another model on slices of parameters, because their update is not elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import Runtime

# By the ends of names of classes in lower case: many packages offer the same algorithm, as FusedLAMB or DistributedMuon, say.
_QUANTISES = "it quantises its state in blocks, which would be others than those of the whole parameter"
_REASONS_OF_VALUES = {
    "8bit": _QUANTISES,
    "4bit": _QUANTISES,
    "fp8": _QUANTISES,
    "lamb": "it compares norms of whole parameters",
    "lars": "it compares norms of whole parameters",
    "lbfgs": "it takes dot products over whole parameters",
}
_REASONS_OF_SHAPE = {
    "adafactor": "it keeps the second moment by rows and columns of whole parameters",
    "muon": "it makes whole matrices orthogonal",
    "shampoo": "it multiplies whole matrices",
    "soap": "it multiplies whole matrices",
}


def check_steps(runtime: Runtime) -> None:
    """Check the optimizer before every step until shutdown, also in a loop without a manager."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _check_step(optimizer))
    runtime.at_shutdown.append(hook.remove)


def check_elementwise(optimizer: Any) -> None:
    """Raise :class:`ConfigError` if ``optimizer`` has distributed parameters and cannot train slices of them.

    The attribute ``bmt_elementwise`` of the optimizer or its class says whether it can. Without it, optimizers that are known to
    need whole parameters are refused, and all others count as elementwise.
    """
    reason = _reason_of_shape(optimizer) or _reason_of_values(optimizer)
    if reason is not None and _distributed(optimizer):
        raise _refusal(optimizer, reason)


def _check_step(optimizer: Any) -> None:
    """Raise :class:`ConfigError` only if this step would go wrong: a rank may have every value, as at level 0, but flat."""
    of_shape, of_values = _reason_of_shape(optimizer), _reason_of_values(optimizer)
    if of_shape is None and of_values is None:
        return
    for p in _distributed(optimizer):
        reason = of_shape or of_values if p.is_part else of_shape if p.shape != p.whole_shape else None
        if reason is not None:
            raise _refusal(optimizer, reason)


def _reason_of_shape(optimizer: Any) -> str | None:
    """Return why ``optimizer`` needs the shapes of whole parameters."""
    declared = getattr(optimizer, "bmt_elementwise", None)
    if declared is not None:
        return None if declared else "it says bmt_elementwise = False"
    return _reason_of_name(optimizer, _REASONS_OF_SHAPE)


def _reason_of_values(optimizer: Any) -> str | None:
    """Return why ``optimizer`` needs all values of a parameter on one rank, in any shape."""
    if getattr(optimizer, "bmt_elementwise", None) is not None:
        return None
    return _reason_of_name(optimizer, _REASONS_OF_VALUES)


def _reason_of_name(optimizer: Any, reasons: Mapping[str, str]) -> str | None:
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return next((reason for name in names for end, reason in reasons.items() if name.endswith(end)), None)


def _distributed(optimizer: Any) -> list[DistributedParameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DistributedParameter)]


def _refusal(optimizer: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} cannot train sharded parameters, of which each rank has a 1-D slice: {reason}."
        " Use an elementwise optimizer (AdamOptimizer, say), or keep these parameters out of Blocks and wrappers. If this"
        " optimizer does see whole parameters (DistributedParameter.gather), say bmt_elementwise = True in its class."
    )
