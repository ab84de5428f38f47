"""Optimizers for bmt: the manager that scales, clips and steps, Adam, and
learning-rate schedules.
"""

from bmt_optim import lr_scheduler
from bmt_optim.adam.adamw import AdamW
from bmt_optim.adam.optimizer import AdamOptimizer
from bmt_optim.by_name import available, create
from bmt_optim.decay_groups import param_groups
from bmt_optim.gathered_states import gather_state, scatter_state
from bmt_optim.manager import OptimManager
from bmt_optim.offload.optimizer import AdamOffloadOptimizer
from bmt_optim.whole_tensors.optimizer import whole

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "AdamW",
    "OptimManager",
    "available",
    "create",
    "gather_state",
    "lr_scheduler",
    "param_groups",
    "scatter_state",
    "whole",
]
