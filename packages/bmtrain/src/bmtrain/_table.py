"""``TABLE``: where the names of the facade's modules come from, as module → name → :class:`Home`.

``tools/facade_stubs.py`` writes the stubs (``*.pyi``) from this table. A test compares the table, the stubs and the packages.
"""

from __future__ import annotations

from typing import NamedTuple


class Home(NamedTuple):
    """The module that defines a name, and the name there."""

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
_WAIT_LOADER = _from("bmtrain._streams", "wait_loader")
_SCHEDULERS = _from("bmt_optim.lr_scheduler", "Cosine Exponential Linear NoDecay Noam WSD WarmupLRScheduler")

TABLE: dict[str, dict[str, Home]] = {
    "bmtrain": {
        **_from(
            "bmt_core",
            """
            BmtError CheckpointError ConfigError DistributedModule DistributedParameter NotInitializedError
            ParameterInitializer PluginError RemoteError current gather_result grouped_parameters init_distributed
            init_parameters is_initialized latest load load_checkpoint rank save save_checkpoint shutdown sum_loss synchronize
            wait_for_saves world_size
            """,
        ),
        **_from("bmtrain.global_var", "config"),
        **_from("bmtrain.utils", "print_block print_dict print_rank see_memory"),
        **_WAIT_LOADER,
        **_BLOCKS,
        **_from("bmt_zero", "BMTrainModelWrapper no_sync"),
        **_from("bmt_pipeline", "PipelineTransformerBlockList"),
    },
    "bmtrain.benchmark": _from("bmt_core.benchmark", "all_gather reduce_scatter send_recv"),
    "bmtrain.block_layer": _BLOCKS,
    "bmtrain.distributed": _COLLECTIVES,
    "bmtrain.init": _from("bmt_core", "init_distributed is_initialized"),
    "bmtrain.inspect": _from(
        "bmt_core.inspect", "format_summary inspect_model inspect_tensor record_tensor summary_table"
    ),
    "bmtrain.layer": _from("bmt_core", "DistributedModule"),
    "bmtrain.loss": _from("bmt_core.loss", "FusedCrossEntropy"),
    "bmtrain.loss._function": _from("bmt_core.loss._function", "has_inf_nan"),
    "bmtrain.lr_scheduler": _SCHEDULERS,
    "bmtrain.lr_scheduler.warmup": _from("bmt_optim.lr_scheduler", "WarmupLRScheduler"),
    "bmtrain.nn": {
        **_from("bmt_core.nn", "Linear OpLinear"),
        **_from("bmt_tp", "ColumnParallelLinear RowParallelLinear VPEmbedding"),
        **_PARALLEL_LINEAR,
    },
    "bmtrain.nn.parallel_linear_func": _PARALLEL_LINEAR,
    "bmtrain.optim": _from(
        "bmt_optim", "AdamOffloadOptimizer AdamOptimizer OptimManager available create param_groups"
    ),
    "bmtrain.optim.optim_manager": _from("bmt_optim", "OptimManager"),
    "bmtrain.param_init": _from("bmt_core", "grouped_parameters init_parameters"),
    "bmtrain.parameter": _from("bmt_core", "DistributedParameter ParameterInitializer"),
    "bmtrain.pipe_layer": _from("bmt_pipeline", "PipelineTransformerBlockList"),
    "bmtrain.synchronize": {**_from("bmt_core", "gather_result sum_loss synchronize"), **_WAIT_LOADER},
    "bmtrain.wrapper": _from("bmt_zero", "BMTrainModelWrapper"),
}


FILE_MODULES = ("bmtrain.debug", "bmtrain.global_var", "bmtrain.nccl", "bmtrain.store", "bmtrain.utils")
"""Public modules with code of their own, which only scripts written for BMTrain need."""

# Literal texts, which a test finds and checks. From a clone pip needs the paths of all our packages that are involved.
INSTALL_HINTS = {
    "bmt_core": "pip install bmt-core, or from a clone: pip install ./packages/bmt-core",
    "bmt_optim": 'pip install "bmt-train[optim]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-optim',
    "bmt_pipeline": 'pip install "bmt-train[pipeline]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-zero'
    " ./packages/bmt-pipeline",
    "bmt_tp": 'pip install "bmt-train[tp]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-tp',
    "bmt_zero": 'pip install "bmt-train[zero]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-zero',
}
"""How a user installs each package that names come from."""


def submodules(module: str) -> list[str]:
    """Return the last parts of the names of the public modules directly below ``module``, in the table or in a file.

    >>> submodules("bmtrain.optim")
    ['optim_manager']
    """
    prefix = f"{module}."
    return [
        name.removeprefix(prefix)
        for name in (*TABLE, *FILE_MODULES)
        if name.startswith(prefix) and "." not in name[len(prefix) :]
    ]
