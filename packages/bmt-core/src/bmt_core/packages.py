"""The packages of bmt, as ``bmt doctor`` and error messages name them. The core imports none of the others."""

from __future__ import annotations

from typing import NamedTuple


class Package(NamedTuple):
    """One package of bmt, for somebody who may not have it."""

    module: str
    provides: str
    install: str
    """How to install it, beside a core that is there."""


# Literal texts, which a test finds and checks. From a clone pip needs the paths of all our packages that are involved.
PACKAGES = {
    "bmt-core": Package(
        "bmt_core",
        "start, grid of ranks, collectives, plugins, sharded parameters, checkpoints, the program bmt",
        "pip install bmt-core, or from a clone: pip install ./packages/bmt-core",
    ),
    "bmt-kernels": Package(
        "bmt_kernels",
        "compiled kernels for CPU and CUDA, and the backend nccl-native; without them plain torch does the same, slower",
        'pip install "bmt-train[kernels]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-kernels',
    ),
    "bmt-optim": Package(
        "bmt_optim",
        "OptimManager, loss scaling, clipping, Adam, Adam on the host, learning-rate schedules",
        'pip install "bmt-train[optim]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-optim',
    ),
    "bmt-pipeline": Package(
        "bmt_pipeline",
        "pipelines: PipelineTransformerBlockList, train_step and its schedules, init_distributed(pipe_size=...)",
        'pip install "bmt-train[pipeline]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-zero'
        " ./packages/bmt-pipeline",
    ),
    "bmt-tp": Package(
        "bmt_tp",
        "tensor parallelism: parallel linear layers and embedding, parallelize, init_distributed(tp_size=...)",
        'pip install "bmt-train[tp]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-tp',
    ),
    "bmt-train": Package(
        "bmtrain",
        "the one name for all of them: import bmtrain as bmt",
        "pip install bmt-train, or from a clone: pip install ./packages/bmt-core ./packages/bmtrain",
    ),
    "bmt-zero": Package(
        "bmt_zero",
        "Block, TransformerBlockList, ZeRO levels, recomputation, BMTrainModelWrapper",
        'pip install "bmt-train[zero]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-zero',
    ),
}
"""By the names of the distributions."""
