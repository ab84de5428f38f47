"""Optimizers over whole tensors train models in Blocks, over stages and with split layers as they
train plain ones.
"""

from __future__ import annotations

import pytest
from whole_trainings import (
    KINDS,
    assert_alike,
    by_manager,
    expected,
    expected_in_plain_loop,
    in_plain_loop,
)

from bmt_testing import run_ranks

MIXED = (0, 1, 2, 3)
IN_FLOAT32 = 2e-6
"""The tolerance of a training that is clipped by a norm, which is formed in float32."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("levels", [MIXED, (3, 3, 3, 3)])
def test_a_manager_trains_as_plain_torch(kind: str, ranks: int, levels: tuple[int, ...]) -> None:
    wanted = expected(kind)
    for found in run_ranks(by_manager, ranks, kind, levels)[:1]:
        assert_alike(found, wanted, IN_FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_loop_with_mean_gradients_trains_as_plain_torch(kind: str, ranks: int) -> None:
    wanted = expected_in_plain_loop(kind)
    for found in run_ranks(in_plain_loop, ranks, kind, MIXED, init={"gradients": "mean"})[:1]:
        assert_alike(found, wanted, 1e-10)
