"""``param_dtype``: parameters, gradients and optimizers in float32, gathers and computation in
bfloat16. What a training computes is what one process of plain torch computes that casts float32
parameters as part of the graph, on the ranks' parts of a batch one after the other.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from dtype_models import (
    HALF,
    Layer,
    Model,
    assert_equal,
    batch,
    built,
    cast_arguments,
    train_plainly,
    train_sharded,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zero_models import all_weights

from bmt_core import ConfigError, DistributedParameter
from bmt_core.run.runtime import rank, world_size
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    TransformerBlockList,
    gathered_memory,
    no_sync,
)
from bmt_zero.param_dtype import check_param_dtype, kept_by_hugging_face

LEVELS = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)]


def loss_of(call: Any, step: int, part: int, parts: int) -> torch.Tensor:
    loss: torch.Tensor = call(batch(step).chunk(parts)[part])
    return loss


def plainly(parts: int, *, keeps_routers: bool = True) -> dict[str, Any]:
    model = built()
    cast_arguments(model.layers)
    routers = {layer.router.weight for layer in model.layers if keeps_routers}
    return train_plainly(model, routers, partial(loss_of, parts=parts), parts)


def sharded(
    levels: tuple[int, ...], recomputes: bool, *, keeps_routers: bool = True, **options: Any
) -> Model:
    model = built(keeps_routers=keeps_routers)
    for layer, level in zip(model.layers, levels, strict=True):
        Block(layer, recomputes, level, param_dtype=HALF, **options)
    return BMTrainModelWrapper(model, param_dtype=HALF)


def trained(model: nn.Module) -> dict[str, Any]:
    return train_sharded(model, partial(loss_of, parts=world_size()), rank())


@on_ranks(1, 2, 4, init={"gradients": "mean"})
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("levels", [*LEVELS, (0, 3, 1)], ids=str)
def test_training_equals_plain_torch_bit_for_bit(
    levels: tuple[int, ...], recomputes: bool, world_size: int
) -> None:
    expected, model = plainly(world_size), sharded(levels, recomputes)
    with all_weights:
        found = trained(model)
    assert_equal(found, expected, rank())
    if world_size == 1:
        assert all(v is None or torch.equal(v, expected[name]) for name, v in found.items())
    assert found["gradient 2 layers.0.up.weight"].abs().max() > 1e-3


# Sums over ranks in bfloat16 are off by a rounding of it, and pairs of settings are tried.
TRAININGS = [
    TrainingSettings(ranks=2, levels=(0, 1, 2, 3), recompute=(True, False), micro_batches=2),
    TrainingSettings(ranks=2, levels=(1, 0), micro_batches=3, no_sync=True, prefetch_bytes=0),
    TrainingSettings(ranks=2, levels=(3, 2), frozen=((1, 3), (2,)), gradients="sum", max_norm=0.1),
    TrainingSettings(ranks=2, levels=(3,), reload=True, optimizer="adam", reduce_dtype="fp32"),
    TrainingSettings(ranks=4, shard_size=2, levels=(3, 1, 0), micro_batches=2, no_sync=True),
    TrainingSettings(ranks=4, shard_size=1, levels=(2, 3), reduce_dtype="param", reload=True),
    TrainingSettings(ranks=4, shard_size=2, optimizer_shards="all", levels=(3, 1, 2)),
    TrainingSettings(
        ranks=4, shard_size=2, optimizer_shards="all", levels=(1, 3), micro_batches=3, no_sync=True,
        recompute=(True,), gradients="sum", max_norm=0.1, optimizer="adam",
    ),
    TrainingSettings(ranks=4, levels=(0, 3), reduce_dtype="param", frozen=((2, 5),), seed=1),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("settings", TRAININGS, ids=str)
def test_training_of_any_kind_equals_plain_torch(
    settings: TrainingSettings, dtypes: tuple[Any, Any]
) -> None:
    dtype, param_dtype = dtypes
    drawn = dataclasses.replace(settings, dtype=dtype, param_dtype=param_dtype)
    assert_matches_single(Model, batch, settings=drawn, reference="parts")
