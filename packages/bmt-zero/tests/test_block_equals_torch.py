"""Sharding never changes the mathematics: losses, gradients and parameters equal one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zero_models import plain, sharded

from bmt_core.testing import run_ranks

MIXED = (0, 3, 1)
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
