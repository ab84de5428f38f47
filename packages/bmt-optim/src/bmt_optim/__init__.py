"""Optimizers for bmt: the manager that scales, clips and steps, Adam, and learning-rate schedules."""

from bmt_optim import lr_scheduler
from bmt_optim.adam import AdamOptimizer
from bmt_optim.choice import available, create
from bmt_optim.logical_state import gather_state, scatter_state
from bmt_optim.offload import AdamOffloadOptimizer
from bmt_optim.optim_manager import OptimManager

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "OptimManager",
    "available",
    "create",
    "gather_state",
    "lr_scheduler",
    "scatter_state",
]
