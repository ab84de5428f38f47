"""Parameters outside of Blocks that are gathered and reduced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from root_group_models import (
    complex_and_unused,
    expert_of_a_layer_that_was_skipped,
    hooked_and_unread,
    in_other_modes,
    model,
    of_two_calls,
    survives_failures,
    trained,
    trained_on_ranks,
    used_on_rank_0_only,
    with_penalty,
)
from torch import nn

from bmt_core.run.runtime import current
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper

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


def accumulated(uses: str, in_block: bool) -> tuple[list[float], list[float]]:
    """The summed gradients of two bfloat16 parameters after a large one and then small ones, and the exact sums.

    Each letter is a micro-batch: B uses both parameters, 1 the first one only; N reads both and uses the first one only, and R does
    so on rank 1.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            self.second = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

        def forward(self, factor: torch.Tensor, letter: str) -> torch.Tensor:
            out = self.first.float().sum() * factor
            if letter == "1":
                return out
            second = self.second.float().sum() * factor
            return out if letter == "N" or (letter == "R" and current().rank == 1) else out + second

    model = BMTrainModelWrapper(nn.Sequential(Two()))[0]
    if in_block:
        model = Block(model, zero_level=2)
    exact = [0.0, 0.0]
    for number, letter in enumerate(uses):
        factor = 128.0 if number == 0 else 0.25
        if in_block:  # a Block has gradients of all that trains
            model.second.requires_grad_(letter == "B")
        model(torch.tensor(factor), letter).backward()
        exact[0] += 2 * factor
        exact[1] += factor * {"B": 2, "R": 1, "N": 0, "1": 0}[letter]
    grads = [parameter.gather_like(parameter.grad)[0].item() for parameter in model.parameters()]
    return grads, exact


@pytest.mark.parametrize(
    ("uses", "in_block"),
    [
        ("BBBBBBBBB", False),
        ("BB1BB1BB1BB1B", False),
        ("BNBNRNBNBNRNBNBN", False),
        ("B1B1B1BB1BBB", False),
        ("BB1BB1BB1BB", True),
    ],
)
def test_small_gradients_add_up_though_micro_batches_use_other_parameters(uses: str, in_block: bool) -> None:
    for grads, exact in run_ranks(accumulated, 2, uses, in_block):
        assert grads == [torch.tensor(value).bfloat16().item() for value in exact]


def test_what_only_one_rank_uses_has_a_gradient_on_all() -> None:
    assert run_ranks(used_on_rank_0_only, 2, True) == [[True, True]] * 2


def test_what_only_one_rank_uses_of_a_shared_layer_that_the_last_call_skipped_has_a_gradient_on_all() -> None:
    first, *others = run_ranks(expert_of_a_layer_that_was_skipped, 2, timeout=30)
    assert all(grad.abs().sum() > 0 for grad in first) and len(first) == 3
    torch.testing.assert_close(others, [first])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_with_and_without_all_gradients_add_up_in_one_pass(dtype: torch.dtype) -> None:
    assert run_ranks(of_two_calls, 2, dtype) == [[[12.0], [6.0]]] * 2
