"""Sharding never changes the mathematics: losses, gradients and parameters equal one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zero_models import adam, plain, sharded

from bmt_testing import run_ranks

MIXED = (0, 3, 1)
ON_GPUS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2, 4)]
LEVELS = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), MIXED, (3, 2, 3)]


def assert_equal(results: list[dict[str, Any]], expected: dict[str, Any], rtol: float, atol: float) -> None:
    total = sum(result["loss"] for result in results)
    torch.testing.assert_close(total, expected["loss"], rtol=rtol, atol=atol)
    for result in results:
        assert result["grad"].keys() == expected["grad"].keys()
        assert result["state"].keys() == expected["state"].keys()
        for part in ("grad", "state"):
            for name, value in expected[part].items():
                torch.testing.assert_close(
                    result[part][name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_training_equals_plain_torch(world_size: int, levels: tuple[int, ...], use_checkpoint: bool) -> None:
    results = run_ranks(sharded, world_size, levels, use_checkpoint)
    assert_equal(results, plain(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("levels", [(0, 0, 0), (1, 1, 1), (3, 2, 3), MIXED], ids=str)
def test_bfloat16_training_equals_plain_torch_to_its_rounding(world_size: int, levels: tuple[int, ...]) -> None:
    results = run_ranks(sharded, world_size, levels, True, dtype=torch.bfloat16, lr=0.01)
    # One rounding of bfloat16 is 2**-8; five steps of sums of a few of them.
    assert_equal(results, plain(dtype=torch.bfloat16, lr=0.01), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("levels", [(1, 1, 1), (3, 3, 3), MIXED], ids=str)
def test_accumulated_micro_batches_equal_plain_torch(world_size: int, levels: tuple[int, ...]) -> None:
    # In float64: roundings of float32 fall differently on processors of other vector widths, and add up over micro-batches.
    results = run_ranks(sharded, world_size, levels, True, dtype=torch.float64, micro_batches=3)
    assert_equal(results, plain(dtype=torch.float64, micro_batches=3), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("levels", [(0, 0, 0), (3, 3, 3), MIXED], ids=str)
def test_torchs_own_adamw_trains_the_shards(world_size: int, levels: tuple[int, ...]) -> None:
    results = run_ranks(sharded, world_size, levels, True, optimizer=adam)
    # Adam divides by the root of the second moment: where that is tiny, rounding grows.
    assert_equal(results, plain(optimizer=adam), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("world_size", ON_GPUS)
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_training_on_gpus_equals_plain_torch_on_the_cpu(
    world_size: int, levels: tuple[int, ...], use_checkpoint: bool
) -> None:
    results = run_ranks(sharded, world_size, levels, use_checkpoint, init={"device": "cuda"}, timeout=120)
    assert_equal(results, plain(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("world_size", ON_GPUS)
@pytest.mark.parametrize("levels", [(0, 1, 2), (3, 3, 3)], ids=str)
def test_bfloat16_accumulation_on_gpus_equals_plain_torch(world_size: int, levels: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "lr": 0.01, "micro_batches": 3}
    results = run_ranks(sharded, world_size, levels, True, init={"device": "cuda"}, timeout=120, **options)
    assert_equal(results, plain(**options), rtol=0.05, atol=0.03)
