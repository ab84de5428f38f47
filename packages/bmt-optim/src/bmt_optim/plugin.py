"""The hooks that this package implements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.plugins.hookspecs import hookimpl
from bmt_optim.adam.adamw import AdamW
from bmt_optim.adam.optimizer import AdamOptimizer
from bmt_optim.offload.optimizer import AdamOffloadOptimizer


@hookimpl
def bmt_optimizers() -> Sequence[type[torch.optim.Optimizer]]:
    """The optimizers that ``optim.create`` finds by name."""
    return [AdamOptimizer, AdamW, AdamOffloadOptimizer]
