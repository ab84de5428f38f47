"""Optimizers that would train another model on slices of parameters, because their update is not elementwise."""

from __future__ import annotations

import re
from typing import Any

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter

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
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if any(_QUANTISED.search(name) for name in names):
        return "it quantises its state in blocks, which would be others than those of the whole parameter"
    return next((reason for name in names for end, reason in _REASONS.items() if name.endswith(end)), None)
