"""Optimizers that would train another model on slices of parameters, because their update is not elementwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Call :func:`check_elementwise` before every step of any optimizer until shutdown, also in a loop without a manager."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_elementwise(optimizer))
    runtime.at_shutdown.append(hook.remove)


def check_elementwise(optimizer: Any) -> None:
    """Raise :class:`ConfigError` if ``optimizer`` has sharded parameters and cannot train slices of them.

    The attribute ``bmt_elementwise`` of the optimizer or its class says whether it can. Without it, optimizers that are known to
    need whole parameters are refused, and all others count as elementwise.
    """
    declared = getattr(optimizer, "bmt_elementwise", None)
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    of_shape = "it says bmt_elementwise = False" if declared is False else _reason(names, _REASONS_OF_SHAPE)
    reason = of_shape or _reason(names, _REASONS_OF_VALUES)
    if declared or reason is None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DistributedParameter)]
    # A parameter of which this rank has every value may be flat all the same.
    if any(p.is_part or (of_shape and p.shape != p.whole_shape) for p in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot train sharded parameters, of which each rank has a 1-D slice: {reason}."
            " Use an elementwise optimizer (AdamOptimizer, say), or keep these parameters out of Blocks and wrappers. If this"
            " optimizer does see whole parameters (DistributedParameter.gather), say bmt_elementwise = True in its class."
        )


def _reason(names: Sequence[str], reasons: Mapping[str, str]) -> str | None:
    return next((reason for name in names for end, reason in reasons.items() if name.endswith(end)), None)
