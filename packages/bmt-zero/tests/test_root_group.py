"""Parameters outside of Blocks that are gathered and reduced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from root_group_models import (
    complex_and_unused,
    hooked_and_unread,
    in_other_modes,
    model,
    survives_failures,
    trained,
    trained_on_ranks,
    used_on_rank_0_only,
    with_penalty,
)

from bmt_core.testing import run_ranks

# Two steps alike, so that the second is what was expected; then others than expected; then as the first again.
PLAN: list[dict[str, Any]] = [{}, {}, {"use_spare": True}, {"use_spare": True}, {"micro": 3}, {"read_spare": True}, {}]


def assert_equal(ranks: list[Any], plain: Any, tolerance: float) -> None:
    for step, (losses, grads, parameters) in enumerate(plain):
        torch.testing.assert_close(sum(history[step][0] for history in ranks), losses, rtol=tolerance, atol=tolerance)
        for history in ranks:
            _, own_grads, own_parameters = history[step]
            assert [g is None for g in own_grads] == [g is None for g in grads]
            for own, expected in zip(own_grads, grads, strict=True):
                if expected is not None:
                    torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)
            for own, expected in zip(own_parameters, parameters, strict=True):
                torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduce_dtype", ["fp32-sum", "param", "fp32"])
def test_training_equals_plain_torch(world_size: int, tied: bool, reduce_dtype: str) -> None:
    plain = trained(model(tied=tied), lambda batch: batch, PLAN)
    ranks = run_ranks(trained_on_ranks, world_size, PLAN, {"tied": tied}, init={"reduce_dtype": reduce_dtype})
    assert_equal(ranks, plain, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2])
def test_training_equals_plain_torch_on_gpus(world_size: int) -> None:
    plain = trained(model(), lambda batch: batch, PLAN)
    ranks = run_ranks(trained_on_ranks, world_size, PLAN, {}, init={"device": "cuda"}, timeout=120)
    assert_equal(ranks, plain, 1e-3)


@pytest.mark.parametrize("reduce_dtype", ["fp32-sum", "param", "fp32"])
def test_half_gradients_are_close(reduce_dtype: str) -> None:
    options = {"dtype": torch.bfloat16}
    plain = trained(model(**options), lambda batch: batch, PLAN[:2])
    for history in run_ranks(trained_on_ranks, 2, PLAN[:2], options, init={"reduce_dtype": reduce_dtype}):
        for own, expected in zip(history[1][1], plain[1][1], strict=True):
            if expected is not None:
                torch.testing.assert_close(own, expected, rtol=0.1, atol=0.02)


def test_what_only_one_rank_uses_has_a_gradient_on_all() -> None:
    assert run_ranks(used_on_rank_0_only, 2, True) == [[True, True]] * 2


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    assert run_ranks(survives_failures, 2) == [(True, True)] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_in_other_modes_and_changed_parameters_are_seen(world_size: int) -> None:
    assert run_ranks(in_other_modes, world_size) == [True] * world_size


def test_what_was_gathered_by_itself_adds_to_what_is_reduced_together() -> None:
    for expected, found in run_ranks(with_penalty, 2):
        torch.testing.assert_close(found, expected)


def test_complex_parameters_without_gradient_have_none() -> None:
    for used, spare in run_ranks(complex_and_unused, 2):
        assert used.tolist() == [0, 2, 4, 6, 8] and spare is None


def test_hooks_see_no_gradient_of_parameters_that_were_not_read() -> None:
    assert run_ranks(hooked_and_unread, 2) == [True, True]
