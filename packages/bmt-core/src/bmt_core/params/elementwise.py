"""Optimizers that would train another model on slices of parameters, because their update is not elementwise."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import Runtime

# By the ends of names of classes in lower case: many packages offer the same algorithm, as FusedLAMB or DistributedMuon, say.
_REASONS = {
    "adafactor": "it keeps the second moment by rows and columns of whole parameters",
    "lamb": "it compares norms of whole parameters",
    "lars": "it compares norms of whole parameters",
    "lbfgs": "it takes dot products over whole parameters",
    "muon": "it makes whole matrices orthogonal",
    "shampoo": "it multiplies whole matrices",
    "soap": "it multiplies whole matrices",
}
_QUANTISED = re.compile(r"(8bit|4bit|fp8)$")


def check_steps(runtime: Runtime) -> None:
    """Call :func:`check_elementwise` before every step of any optimizer until shutdown, also in a loop without a manager."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_elementwise(optimizer))
    runtime.at_shutdown.append(hook.remove)


def check_elementwise(optimizer: Any) -> None:
    """Raise :class:`ConfigError` if ``optimizer`` has sharded parameters and cannot train slices of them.

    The attribute ``bmt_elementwise`` of the optimizer or its class says whether it can. Without it, optimizers that are known to
    need whole parameters are refused, and all others count as elementwise.
    """
    reason = _reason_against(optimizer)
    if reason is None:
        return
    if any(isinstance(p, DistributedParameter) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot train sharded parameters, of which each rank has a 1-D slice: {reason}."
            " Use an elementwise optimizer (AdamOptimizer, say), or keep these parameters out of Blocks and wrappers. If this"
            " optimizer does see whole parameters (DistributedParameter.gather), say bmt_elementwise = True in its class."
        )


def _reason_against(optimizer: Any) -> str | None:
    declared = getattr(optimizer, "bmt_elementwise", None)
    if declared is not None:
        return None if declared else "it says bmt_elementwise = False"
    kind: Any = type(optimizer)
    return _reason_against_class(kind)


@functools.cache
def _reason_against_class(optimizer: type) -> str | None:
    names = [kind.__name__.lower() for kind in optimizer.__mro__]
    if any(_QUANTISED.search(name) for name in names):
        return "it quantises its state in blocks, which would be others than those of the whole parameter"
    return next((reason for name in names for end, reason in _REASONS.items() if name.endswith(end)), None)
