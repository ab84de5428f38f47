"""``TABLE``: the origin of the facade's names, as module → name → :class:`Home`; ``OLD_PATHS``:
that of BMTrain's other modules.

``tools/facade_stubs.py`` writes the stubs (``*.pyi``) from ``TABLE``. A test compares the table,
the stubs and the packages.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    "bmt_core.run.collectives",
    "all_gather all_reduce broadcast recv_activations reduce_scatter send_activations",
)
_PARALLEL_LINEAR = _from("bmt_tp", "OpParallelLinear ReduceType")
_WAIT_LOADER = _from("bmtrain._streams", "wait_loader")
_SCHEDULERS = _from(
    "bmt_optim.lr_scheduler", "Cosine Exponential Linear NoDecay Noam WSD WarmupLRScheduler"
)

TABLE: dict[str, dict[str, Home]] = {
    "bmtrain": {
        **_from(
            "bmt_core",
            """
            BmtError CallError CheckpointError ConfigError NotInitializedError MeshAxis PluginError
            RemoteError current gather_result init_distributed is_initialized mean_loss rank
            shutdown sum_loss synchronize world_size
            """,
        ),
        **_from(
            "bmt_params",
            """
            BlockUse DistributedModule DistributedParameter Locality ParameterInitializer
            grouped_parameters init_parameters whole_parameters
            """,
        ),
        **_from(
            "bmt_checkpoint",
            "latest load load_checkpoint lock_checkpoints save save_checkpoint wait_for_saves",
        ),
        **_from("bmtrain.global_var", "config"),
        **_from("bmtrain.utils", "print_block print_dict print_rank see_memory"),
        **_WAIT_LOADER,
        **_BLOCKS,
        **_from("bmt_zero", "BMTrainModelWrapper no_sync"),
        **_from("bmt_pipeline", "PipelineTransformerBlockList"),
    },
    "bmtrain.benchmark": _from("bmtrain._benchmark", "all_gather reduce_scatter send_recv"),
    "bmtrain.block_layer": {**_BLOCKS, **_from("bmtrain.utils", "round_up")},
    "bmtrain.cp": _from("bmt_cp", "Part attention gather split"),
    "bmtrain.distributed": _COLLECTIVES,
    "bmtrain.init": {
        **_from("bmt_core", "init_distributed is_initialized"),
        "topology": Home("bmt_core", "Topology"),
    },
    "bmtrain.inspect": _from(
        "bmtrain._inspect",
        "format_summary inspect_model inspect_tensor record_tensor summary_table",
    ),
    "bmtrain.layer": _from("bmt_params", "DistributedModule"),
    "bmtrain.loss": {
        **_from("bmtrain._cross_entropy", "FusedCrossEntropy"),
        **_from("bmt_params.losses.linear_cross_entropy", "linear_cross_entropy"),
    },
    "bmtrain.loss._function": _from("bmtrain._loss_functions", "has_inf_nan"),
    "bmtrain.lr_scheduler": _SCHEDULERS,
    "bmtrain.lr_scheduler.warmup": _from("bmt_optim.lr_scheduler", "WarmupLRScheduler"),
    "bmtrain.nn": {
        **_from("bmtrain._linear", "Linear OpLinear"),
        **_from("bmt_tp", "ColumnParallelLinear RowParallelLinear VPEmbedding"),
        **_PARALLEL_LINEAR,
    },
    "bmtrain.nn.parallel_linear_func": _PARALLEL_LINEAR,
    "bmtrain.optim": _from(
        "bmt_optim",
        "AdamOffloadOptimizer AdamOptimizer AdamW OptimManager available create param_groups whole",
    ),
    "bmtrain.optim.optim_manager": _from("bmt_optim", "OptimManager"),
    "bmtrain.param_init": _from(
        "bmt_params", "grouped_parameters init_parameters iterate_parameters"
    ),
    "bmtrain.parameter": _from("bmt_params", "DistributedParameter ParameterInitializer"),
    "bmtrain.pipe_layer": _from("bmt_pipeline", "PipelineTransformerBlockList"),
    "bmtrain.synchronize": {
        **_from("bmt_core", "gather_result sum_loss synchronize"),
        **_WAIT_LOADER,
    },
    "bmtrain.wrapper": {
        **_from("bmt_zero", "BMTrainModelWrapper"),
        "make_distributed": Home("bmt_zero", "BMTrainModelWrapper"),
        "model_wrapper_dispatch": Home("bmt_zero", "BMTrainModelWrapper"),
    },
}

OLD_PATHS: dict[str, dict[str, Home]] = {
    "bmtrain.benchmark.all_gather": _from("bmtrain._benchmark", "all_gather"),
    "bmtrain.benchmark.reduce_scatter": _from("bmtrain._benchmark", "reduce_scatter"),
    "bmtrain.benchmark.send_recv": _from("bmtrain._benchmark", "send_recv"),
    "bmtrain.benchmark.utils": _from("bmtrain.utils", "print_rank round_up"),
    "bmtrain.distributed.ops": _COLLECTIVES,
    "bmtrain.inspect.format": _from("bmtrain._inspect", "format_summary"),
    "bmtrain.inspect.model": _from("bmtrain._inspect", "inspect_model"),
    "bmtrain.inspect.tensor": _from("bmtrain._inspect", "inspect_tensor record_tensor"),
    "bmtrain.loss.cross_entropy": _from("bmtrain._cross_entropy", "FusedCrossEntropy"),
    "bmtrain.lr_scheduler.cosine": _from("bmt_optim.lr_scheduler", "Cosine"),
    "bmtrain.lr_scheduler.exponential": _from("bmt_optim.lr_scheduler", "Exponential"),
    "bmtrain.lr_scheduler.linear": _from("bmt_optim.lr_scheduler", "Linear"),
    "bmtrain.lr_scheduler.no_decay": _from("bmt_optim.lr_scheduler", "NoDecay"),
    "bmtrain.lr_scheduler.noam": _from("bmt_optim.lr_scheduler", "Noam"),
    "bmtrain.nn.column_parallel_linear": _from("bmt_tp", "ColumnParallelLinear"),
    "bmtrain.nn.linear": _from("bmtrain._linear", "Linear OpLinear"),
    "bmtrain.nn.parallel_embedding": _from("bmt_tp", "VPEmbedding"),
    "bmtrain.nn.row_parallel_linear": _from("bmt_tp", "RowParallelLinear"),
    "bmtrain.optim._function": _from(
        "bmtrain._adam_functions", "adam_bf16 adam_cpu adam_fp16 bf16_from_fp32 fp16_from_fp32"
    ),
    "bmtrain.optim.adam": _from("bmt_optim", "AdamOptimizer"),
    "bmtrain.optim.adam_offload": _from("bmt_optim", "AdamOffloadOptimizer"),
}
"""Modules of BMTrain that scripts import from; they have no stubs. Other names in them
are internals.
"""

INTERNALS = (
    "bmtrain.C",
    "bmtrain.benchmark.shape",
    "bmtrain.block_layer.storage_type_cuda",
    "bmtrain.checkpointing",
    "bmtrain.hook_func",
    "bmtrain.nccl.enums",
    "bmtrain.zero_context",
)
"""Modules and functions of BMTrain that mean nothing here: importing one raises an error that
says so.
"""


FILE_MODULES = (
    "bmtrain.debug",
    "bmtrain.global_var",
    "bmtrain.nccl",
    "bmtrain.store",
    "bmtrain.utils",
)
"""Public modules with code of their own, which only scripts written for BMTrain need."""


def children(module: str) -> list[str]:
    """Return the last parts of the names of all modules directly below ``module``, old
    paths included.
    """
    return _below(module, (*TABLE, *FILE_MODULES, *OLD_PATHS))


def submodules(module: str) -> list[str]:
    """Return the last parts of the names of the public modules directly below ``module``, in the
    table or in a file.

    >>> submodules("bmtrain.optim")
    ['optim_manager']
    """
    return _below(module, (*TABLE, *FILE_MODULES))


def _below(module: str, names: Iterable[str]) -> list[str]:
    prefix = f"{module}."
    return [
        name.removeprefix(prefix)
        for name in names
        if name.startswith(prefix) and "." not in name[len(prefix) :]
    ]
