"""The core of bmt: a run, its ranks and their grid, communication, plugins, choice of kernels."""

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
from bmt_core.launch import Launch
from bmt_core.ops import KernelProvider, Kernels
from bmt_core.plugins import Registry
from bmt_core.plugins.hookspecs import hookimpl
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
    "BmtError",
    "CallError",
    "CheckpointError",
    "CommBackend",
    "CommContext",
    "ConfigError",
    "Group",
    "KernelProvider",
    "Kernels",
    "Launch",
    "MeshAxis",
    "NotInitializedError",
    "PluginError",
    "ReduceOp",
    "Registry",
    "RemoteError",
    "RunSettings",
    "Runtime",
    "Topology",
    "Work",
    "current",
    "gather_result",
    "hookimpl",
    "init_distributed",
    "is_initialized",
    "mean_loss",
    "rank",
    "shutdown",
    "sum_loss",
    "synchronize",
    "world_size",
]
