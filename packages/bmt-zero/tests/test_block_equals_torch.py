"""Sharding never changes the mathematics: losses, gradients and parameters equal one process in
plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zero_models import adam, of_all_ranks, plain, sharded

from bmt_testing import on_ranks, run_ranks
from cells import cells
from pairwise import pairwise

MIXED = (0, 3, 1)
LEVELS = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), MIXED, (3, 2, 3)]


def check(
    levels: tuple[int, ...],
    use_checkpoint: bool = True,
    *,
    rtol: float,
    atol: float,
    **training: Any,
) -> None:
    """Compare losses, the gradients of the last step and the final parameters of the
    same training.
    """
    expected, found = plain(**training), sharded(levels, use_checkpoint, **training)
    found["loss"] = sum(of_all_ranks(found["loss"]))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}
# One rounding of bfloat16 is 2**-8; three steps of sums of a few of them.
BFLOAT16 = {"dtype": torch.bfloat16, "lr": 0.01, "rtol": 0.05, "atol": 0.02}
# In float64: roundings of float32 fall differently on processors of other vector widths, and add up
# over micro-batches.
MICRO_BATCHES = {"dtype": torch.float64, "micro_batches": 3, "rtol": 1e-4, "atol": 1e-6}
# Adam divides by the root of the second moment: where that is tiny, rounding grows.
ADAM = {"optimizer": adam, "rtol": 1e-3, "atol": 2e-5}
CASES: dict[int, list[tuple[tuple[int, ...], bool, dict[str, Any]]]] = {
    1: [((3, 3, 3), False, FLOAT32), ((1, 1, 1), True, FLOAT32), (MIXED, False, FLOAT32)],
    2: [(levels, recomputes, FLOAT32) for levels in LEVELS for recomputes in (False, True)],
    4: [
        ((3, 3, 3), False, FLOAT32),
        (MIXED, True, FLOAT32),
        *[(levels, True, BFLOAT16) for levels in [(0, 0, 0), (1, 1, 1), (3, 2, 3), MIXED]],
        *[(levels, True, MICRO_BATCHES) for levels in [(1, 1, 1), (3, 3, 3), MIXED]],
        *[(levels, True, ADAM) for levels in [(0, 0, 0), (3, 3, 3), MIXED]],
    ],
}


@on_ranks(1, 2, 4)
@cells(("levels", "use_checkpoint", "training"), CASES.__getitem__)
def test_training_equals_plain_torch(
    levels: tuple[int, ...], use_checkpoint: bool, training: dict[str, Any]
) -> None:
    check(levels, use_checkpoint, **training)


ON_GPUS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2, 4)]
gpu_options: dict[str, Any] = {"init": {"device": "cuda"}, "timeout": 120}


# By run_ranks, because each number of ranks has a mark of its own.
@pytest.mark.parametrize(
    ("world_size", "use_checkpoint", "levels"),
    [
        pytest.param(*cell, marks=pytest.mark.gpu(cell[0]))
        for cell in pairwise((1, 2, 4), [False, True], LEVELS)
    ],
)
def test_training_on_gpus_equals_plain_torch_on_the_cpu(
    world_size: int, levels: tuple[int, ...], use_checkpoint: bool
) -> None:
    run_ranks(check, world_size, levels, use_checkpoint, rtol=1e-3, atol=1e-5, **gpu_options)


@pytest.mark.parametrize("world_size", ON_GPUS)
@pytest.mark.parametrize("levels", [(0, 1, 2), (3, 3, 3)], ids=str)
def test_bfloat16_accumulation_on_gpus_equals_plain_torch(
    world_size: int, levels: tuple[int, ...]
) -> None:
    training = {"dtype": torch.bfloat16, "lr": 0.01, "micro_batches": 3}
    run_ranks(check, world_size, levels, rtol=0.05, atol=0.03, **training, **gpu_options)
