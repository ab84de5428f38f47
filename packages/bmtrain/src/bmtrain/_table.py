"""Where every public name comes from: module of the facade → name → :class:`Home`.

The stubs (``*.pyi``) are written from this table by ``tools/facade_stubs.py``; a test compares the table, the stubs and what
is really there.
"""

from __future__ import annotations

from typing import NamedTuple


class Home(NamedTuple):
    """The module that a name is taken from, and what it is called there."""

    module: str
    attribute: str

    @property
    def package(self) -> str:
        """The import package, such as ``bmt_zero``."""
        return self.module.partition(".")[0]

    @property
    def distribution(self) -> str:
        """What pip calls the package, such as ``bmt-zero``."""
        return self.package.replace("_", "-")


def _from(module: str, names: str) -> dict[str, Home]:
    return {name: Home(module, name) for name in names.split()}


_BLOCKS = _from("bmt_zero", "Block CheckpointBlock TransformerBlockList")
_COLLECTIVES = _from(
    "bmt_core.run.collectives", "all_gather all_reduce broadcast recv_activations reduce_scatter send_activations"
)
_PARALLEL_LINEAR = _from("bmt_tp", "OpParallelLinear ReduceType")
_SCHEDULERS = _from("bmt_optim.lr_scheduler", "Cosine Exponential Linear NoDecay Noam WSD WarmupLRScheduler")

TABLE: dict[str, dict[str, Home]] = {
    "bmtrain": {
        **_from(
            "bmt_core",
            """
            BmtError CheckpointError ConfigError DistributedModule DistributedParameter NotInitializedError
            ParameterInitializer PluginError RemoteError config current gather_result grouped_parameters
            init_distributed init_parameters is_initialized load load_checkpoint print_block print_dict print_rank rank
            save save_checkpoint see_memory shutdown sum_loss synchronize wait_for_saves wait_loader world_size
            """,
        ),
        **_BLOCKS,
        **_from("bmt_zero", "BMTrainModelWrapper no_sync"),
        **_from("bmt_pipeline", "PipelineTransformerBlockList"),
    },
    "bmtrain.benchmark": _from("bmt_core.benchmark", "all_gather reduce_scatter send_recv"),
    "bmtrain.block_layer": _BLOCKS,
    "bmtrain.debug": _from("bmt_core.debug", "append clear extend get set"),
    "bmtrain.distributed": _COLLECTIVES,
    "bmtrain.global_var": _from("bmt_core", "config rank world_size"),
    "bmtrain.init": _from("bmt_core", "init_distributed is_initialized"),
    "bmtrain.layer": _from("bmt_core", "DistributedModule"),
    "bmtrain.loss": _from("bmt_core.loss", "FusedCrossEntropy"),
    "bmtrain.loss._function": _from("bmt_core.loss._function", "has_inf_nan"),
    "bmtrain.lr_scheduler": _SCHEDULERS,
    "bmtrain.lr_scheduler.warmup": _from("bmt_optim.lr_scheduler", "WarmupLRScheduler"),
    "bmtrain.nccl": _from(
        "bmt_core.nccl",
        """
        allGather allReduce broadcast commCount commRank groupEnd groupStart recv reduce reduceScatter send
        """,
    ),
    "bmtrain.nn": {
        **_from("bmt_tp", "ColumnParallelLinear Linear OpLinear RowParallelLinear VPEmbedding"),
        **_PARALLEL_LINEAR,
    },
    "bmtrain.nn.parallel_linear_func": _PARALLEL_LINEAR,
    "bmtrain.optim": _from("bmt_optim", "AdamOffloadOptimizer AdamOptimizer OptimManager available create"),
    "bmtrain.optim.optim_manager": _from("bmt_optim", "OptimManager"),
    "bmtrain.param_init": _from("bmt_core", "grouped_parameters init_parameters"),
    "bmtrain.parameter": _from("bmt_core", "DistributedParameter ParameterInitializer"),
    "bmtrain.pipe_layer": _from("bmt_pipeline", "PipelineTransformerBlockList"),
    "bmtrain.store": {
        **_from("bmt_core", "load save"),
        **_from("bmt_core.store", "_save_to_rank0 allgather_objects broadcast_object"),
    },
    "bmtrain.synchronize": _from("bmt_core", "gather_result sum_loss synchronize wait_loader"),
    "bmtrain.utils": {
        **_from("bmt_core", "print_block print_dict print_rank see_memory"),
        **_from("bmt_core.utils", "AverageRecorder check_torch_version round_up tp_split_tensor"),
    },
    "bmtrain.wrapper": _from("bmt_zero", "BMTrainModelWrapper"),
}


NOT_YET = ("bmt_pipeline", "bmt_tp")
"""Packages that do not exist yet. The table has their names, so that the error can say where they will be."""

# Written out, so that a test can find each line and check it. From a clone, pip needs the paths of all packages of ours.
INSTALL_HINTS = {
    "bmt_core": "pip install bmt-core, or from a clone: pip install ./packages/bmt-core",
    "bmt_optim": 'pip install "bmt-train[optim]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-optim',
    "bmt_zero": 'pip install "bmt-train[zero]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-zero',
}
"""How a user installs each package that names come from."""


def submodules(module: str) -> list[str]:
    """Return the last parts of the names of the modules directly below ``module``.

    >>> submodules("bmtrain.optim")
    ['optim_manager']
    """
    prefix = f"{module}."
    return [name.removeprefix(prefix) for name in TABLE if name.startswith(prefix) and "." not in name[len(prefix) :]]
