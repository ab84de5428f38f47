"""Tensors of which each rank has a part: parameters, the modules that read them, their initial
values and their state.
"""

from bmt_params.init.parameter_init import (
    ParameterInitializer,
    grouped_parameters,
    init_parameters,
    iterate_parameters,
)
from bmt_params.locality import Locality, local_along
from bmt_params.modules.block_use import BlockUse, Scheduled
from bmt_params.modules.declared_locality import set_locality
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.modules.postponed_gradients import PostponedGradients, postpone_weight_gradients
from bmt_params.modules.whole_parameters import whole_parameters
from bmt_params.parameter import DistributedParameter

__all__ = [
    "BlockUse",
    "DistributedModule",
    "DistributedParameter",
    "Locality",
    "ParameterInitializer",
    "PostponedGradients",
    "Scheduled",
    "grouped_parameters",
    "init_parameters",
    "iterate_parameters",
    "local_along",
    "postpone_weight_gradients",
    "set_locality",
    "whole_parameters",
]
