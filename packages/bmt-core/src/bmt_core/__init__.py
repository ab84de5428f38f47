"""The core of bmt: ranks and their grid, communication, plugins, sharded parameters."""

from bmt_core.comm import CommBackend, CommContext, Group, ReduceOp, Work
from bmt_core.errors import (
    BmtError,
    CallError,
    CheckpointError,
    ConfigError,
    NotInitializedError,
    PluginError,
    RemoteError,
)
from bmt_core.init.parameter_init import ParameterInitializer, init_parameters, iterate_parameters
from bmt_core.launch import Launch
from bmt_core.modules.block_use import BlockUse, Scheduled
from bmt_core.modules.declared_locality import set_locality
from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.modules.postponed_gradients import PostponedGradients, postpone_weight_gradients
from bmt_core.modules.whole_parameters import whole_parameters
from bmt_core.ops import KernelProvider, Kernels
from bmt_core.params.grouped_parameters import grouped_parameters
from bmt_core.params.parameter import DistributedParameter, local_along
from bmt_core.plugins import Registry
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.locality import Locality
from bmt_core.run.rank_results import gather_result, mean_loss, sum_loss
from bmt_core.run.runtime import (
    Runtime,
    current,
    init_distributed,
    is_initialized,
    rank,
    shutdown,
    synchronize,
    world_size,
)
from bmt_core.run.topology import Topology
from bmt_core.settings import MeshAxis, RunSettings

__all__ = [
    "BlockUse",
    "BmtError",
    "CallError",
    "CheckpointError",
    "CommBackend",
    "CommContext",
    "ConfigError",
    "DistributedModule",
    "DistributedParameter",
    "Group",
    "KernelProvider",
    "Kernels",
    "Launch",
    "Locality",
    "MeshAxis",
    "NotInitializedError",
    "ParameterInitializer",
    "PluginError",
    "PostponedGradients",
    "ReduceOp",
    "Registry",
    "RemoteError",
    "RunSettings",
    "Runtime",
    "Scheduled",
    "Topology",
    "Work",
    "current",
    "gather_result",
    "grouped_parameters",
    "hookimpl",
    "init_distributed",
    "init_parameters",
    "is_initialized",
    "iterate_parameters",
    "local_along",
    "mean_loss",
    "postpone_weight_gradients",
    "rank",
    "set_locality",
    "shutdown",
    "sum_loss",
    "synchronize",
    "whole_parameters",
    "world_size",
]
