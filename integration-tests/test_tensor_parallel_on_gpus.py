"""Parallel layers on GPUs: with delays on any stream, over both backends, compiled, and in half precision."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from delays import PLACES, Where, delayed
from tensor_trainings import GRIDS, Record, check, hundred_steps, sharded

from bmt_core.testing import run_ranks
from bmt_tp import overlapped_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(0 < torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CUDA = {"device": "cuda"}


def delayed_training(*arguments: Any) -> Record:
    """Train with delays in one place, in pieces however small; the arguments are those of ``sharded`` and that place."""
    *given, where = arguments
    with delayed(where), patch.object(overlapped_products, "MIN_ROWS", 1):
        return sharded(*given)


def needs(grid: str) -> None:
    if torch.cuda.device_count() < GRIDS[grid][0]:
        pytest.skip(f"needs {GRIDS[grid][0]} GPUs")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("level", "chunks"), [(0, 1), (1, 2), (2, 2), (3, 3)])
def test_delays_change_nothing(level: int, chunks: int, where: Where) -> None:
    block = {"zero_level": level, "use_checkpoint": level % 2 == 1}
    options = {"async_gather_chunks": chunks}
    check("tp 2", training=delayed_training, arguments=(where,), init=CUDA, block=block, options=options)


@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
@pytest.mark.parametrize(("grid", "level"), [("tp 2", 3), ("tp 4", 1), ("tp 2 x dp 2", 2), ("tp 2 x dp 2", 3)])
def test_training_equals_the_dense_model(grid: str, level: int, backend: str) -> None:
    needs(grid)
    check(grid, init={**CUDA, "comm_backend": backend}, block={"zero_level": level})


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "offload"])
def test_optimizers_and_compiled_blocks(optimizer: str, compiles: bool) -> None:
    check("tp 2", dtype=torch.float32, optimizer=optimizer, init=CUDA, block={"compile": compiles})


def test_what_is_replicated_stays_bit_identical_for_a_hundred_steps() -> None:
    for values in run_ranks(hundred_steps, 2, init={"tp_size": 2, **CUDA}, timeout=120):
        assert values and all(torch.equal(value, value[:1].expand_as(value)) for value in values)
