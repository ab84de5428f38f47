"""The hooks that this package implements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.plugins.hookspecs import hookimpl
from bmt_optim.by_name import OWN_OPTIMIZERS


@hookimpl
def bmt_optimizers() -> Sequence[type[torch.optim.Optimizer]]:
    """The optimizers that ``optim.create`` finds by name."""
    return OWN_OPTIMIZERS
