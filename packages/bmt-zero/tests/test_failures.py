"""What fails in forward or backward leaves Blocks that train on, and nothing of the failed pass."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import full_gradient, grads_of

from bmt_core import BmtError, rank
from bmt_core.comm.annotate import PLACES
from bmt_core.run.runtime import current
from bmt_params import DistributedParameter
from bmt_testing import on_ranks, rank_pool
from bmt_zero import Block, BMTrainModelWrapper, gathered_memory
from cells import cells


class Failing(nn.Module):
    """``fails`` in "forward", in "backward", or not."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fails = "backward"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.fails == "forward":
            raise ArithmeticError("on purpose")
        if self.fails == "backward":
            y.register_hook(fail)
        return y


def fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


fails_on_purpose = functools.partial(pytest.raises, ArithmeticError, match="on purpose")


def failing_blocks(level: int) -> Any:
    return nn.Sequential(*[Block(Failing(), zero_level=level) for _ in range(2)])


@on_ranks(2)
@cells("where", ["forward", "backward"])
@cells("use_checkpoint", [False, True])
@cells("level", [1, 2, 3])
def test_an_exception_leaves_the_block_usable_and_nothing_gathered(
    where: str, level: int, use_checkpoint: bool
) -> None:
    block: Any = Block(Failing(4), use_checkpoint, level)
    block.fails = where
    x = torch.ones(2, 4, requires_grad=True)
    with fails_on_purpose():
        block(x).sum().backward()
    assert all(
        isinstance(part, DistributedParameter) and part.dim() == 1 for part in block.parameters()
    )
    block.fails = "not"
    block.zero_grad()
    block(x).sum().backward()
    assert torch.equal(grads_of(block)["linear.weight"], torch.full((4, 4), 4.0))
    assert level < 2 or gathered_memory.current == 0


@on_ranks(2)
@cells("dtype", [torch.float32, torch.bfloat16])
@cells("level", range(4))
def test_a_graph_made_before_another_one_failed_has_its_own_gradients(
    level: int, dtype: torch.dtype
) -> None:
    first, last = blocks = failing_blocks(level).to(dtype)
    losses = []
    last.fails = "not"
    for first.fails in ("backward", "not"):
        losses.append(blocks(torch.ones(1, 2, dtype=dtype)).sum())
    with fails_on_purpose():
        losses[0].backward()
    last.zero_grad()
    losses[1].backward()
    assert grads_of(last)["linear.bias"].tolist() == [2.0, 2.0]


class FailsAtLast(Failing):
    """The weight's gradient is there when it fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.register_hook(lambda grad: fail(grad) if self.fails == "backward" else None)
        return self.linear(x)  # type: ignore[no-any-return]


@on_ranks(2)
@cells("level", range(4))
@cells("use_checkpoint", [False, True])
def test_a_second_pass_through_a_graph_after_one_that_failed_needs_zero_grad(
    level: int, use_checkpoint: bool
) -> None:
    block: Any = Block(FailsAtLast(1024), use_checkpoint, level)  # no small weight
    loss = block(torch.ones(1, 1024, requires_grad=True)).sum()
    with fails_on_purpose():
        loss.backward(retain_graph=True)
    block.fails = "not"
    with pytest.raises(BmtError, match=r"has failed.*Call model\.zero_grad\(\)"):
        loss.backward(retain_graph=True)
    block.zero_grad()
    loss.backward()
    assert grads_of(block)["linear.weight"].unique().tolist() == [2.0]


@on_ranks(2)
def test_a_pass_that_failed_between_blocks_needs_zero_grad_too() -> None:
    first, last = blocks = [Block(nn.Linear(1024, 1024)) for _ in range(2)]
    h = first(torch.ones(1, 1024))
    handle = h.register_hook(fail)
    loss = last(h).sum()
    with fails_on_purpose():
        loss.backward(retain_graph=True)
    handle.remove()
    with pytest.raises(BmtError, match=r"Call model\.zero_grad\(\)"):
        loss.backward(retain_graph=True)
    for block in blocks:
        block.zero_grad()
    loss.backward()
    assert grads_of(last)["bias"].unique().tolist() == [2.0]


def check_that_zero_grad_clears_a_failed_pass(level: int) -> None:
    """The second of two backward passes fails; then a thread lists the parameters, and the model
    clears them.
    """
    first, second = model = failing_blocks(level)
    x = torch.ones(1, 2, device=current().device)

    def gradients() -> list[torch.Tensor | None]:
        model(x).sum().backward()
        return [full_gradient(parameter) for parameter in model.parameters()]

    second.fails = "not"
    with fails_on_purpose():
        gradients()
    model.zero_grad()
    first.fails = "not"
    expected = gradients()
    first.fails = "backward"
    with fails_on_purpose():
        gradients()
    thread = threading.Thread(target=lambda: list(model.parameters()))
    thread.start()
    thread.join()
    # A thread must not end what another one may be running.
    assert first._bmt_block.state.run.calls_in_pass
    model.zero_grad()
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    first.fails = "not"
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


@on_ranks(2)
@cells("level", range(4))
def test_a_model_clears_the_gradients_of_a_failed_backward(level: int) -> None:
    check_that_zero_grad_clears_a_failed_pass(level)


@pytest.mark.gpu(2)
@on_ranks(2, init={"device": "cuda"})
@pytest.mark.parametrize("level", range(4))
def test_on_gpus_a_model_clears_the_gradients_of_a_failed_backward(level: int) -> None:
    check_that_zero_grad_clears_a_failed_pass(level)


class TwoDtypes(nn.Module):
    """Two linear layers, which are gathered by two collectives because their dtypes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).double())
        return y


def train_until_rank_1_fails(in_block: bool) -> None:
    layer = TwoDtypes()
    kept[:] = [model] = [BMTrainModelWrapper(Block(layer) if in_block else layer)]
    model(torch.ones(2, 4))  # from now on the model knows what to gather
    if rank() == 1:
        raise ValueError("planted")
    model(torch.ones(2, 4))


@pytest.mark.parametrize("in_block", [False, True])
def test_a_forward_that_waits_for_a_dead_rank_has_one_error(in_block: bool) -> None:
    """It waits for several gathers, and each fails."""
    outcome, _ = rank_pool(2).outcomes(train_until_rank_1_fails, in_block, init={}, timeout=60)
    assert outcome.traceback.count("Rank 1 has failed (ValueError: planted)") == 1, outcome
    place = ", made in the forward of the model" if in_block else ""
    assert outcome.error_message.endswith(f" for first.weight and 1 others{place}."), outcome


class FailingOnRank1(nn.Module):
    """A linear layer; on rank 1 its third forward or its third backward raises."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what, self.calls = what, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_time = rank() == 1 and self.calls == 3
        if is_time and self.what == "forward":
            raise ValueError("planted")
        y: torch.Tensor = self.linear(x)
        if is_time and self.what == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("planted")


kept: list[nn.Module] = []
"""The last model, which lives until the process ends, as a script's does."""


def train_until_one_fails(what: str) -> None:
    middle = nn.Linear(4, 4) if what == "step" else FailingOnRank1(what)
    layers = [Block(each, use_checkpoint=False) for each in (nn.Linear(4, 4), middle)]
    kept[:] = [model] = [BMTrainModelWrapper(nn.Sequential(*layers))]
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        assert PLACES.now == ""
    if rank() == 1:
        raise ValueError("planted")
    model(torch.ones(2, 4))


def call_another_layer_on_each_rank() -> None:
    layers = [Block(nn.Linear(4, size), use_checkpoint=False) for size in (4, 5)]
    model = BMTrainModelWrapper(nn.Sequential(*layers))
    model(torch.ones(2, 4))
    model[rank()](torch.ones(2, 4))


def test_calls_that_differ_are_named_with_the_layers_in_which_they_were_made() -> None:
    for outcome in rank_pool(2).outcomes(call_another_layer_on_each_rank, init={}, timeout=60):
        for number in range(2):
            assert f"made in the forward of layer {number}" in outcome.error_message, outcome


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_an_error_says_in_which_block_the_rank_was_that_failed(what: str) -> None:
    other, failed = rank_pool(2).outcomes(train_until_one_fails, what, init={}, timeout=60)
    assert failed.error_message == "planted"
    where = "" if what == "step" else f", in the {what} of layer 1"
    assert f"Rank 1 has failed (ValueError: planted){where}." in other.error_message
