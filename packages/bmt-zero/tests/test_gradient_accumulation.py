"""Gradients of several backward passes: summed in float32, held back under ``no_sync``, cleared, of frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import full_gradient

from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, no_sync


def accumulate(level: int, micro_batches: int, dtype: torch.dtype, held: bool) -> list[float]:
    """Every micro-batch has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=dtype), zero_level=level, use_checkpoint=False)
    x = torch.ones(1, 3, dtype=dtype) / runtime.world_size()
    for micro in range(micro_batches):
        if held and micro < micro_batches - 1:
            with no_sync(block):
                block(x).sum().backward()
        else:
            block(x).sum().backward()
    (parameter,) = block.parameters()
    assert isinstance(parameter, DistributedParameter)
    assert parameter.grad is not None and parameter.grad.dtype == dtype
    return parameter.gather_like(parameter.grad).flatten().tolist()


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_gradients_accumulate_in_float32(world_size: int, level: int, held: bool) -> None:
    for values in run_ranks(accumulate, world_size, level, 300, torch.bfloat16, held):
        assert values == [300.0] * 15


def cleared(level: int, set_to_none: bool, held: bool) -> list[float]:
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level)
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
    for _ in range(3):
        if held:
            with no_sync(block):
                block(x).sum().backward()
        else:
            block(x).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    block(x).sum().backward()
    (parameter,) = block.parameters()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_zero_grad_of_either_kind_clears_everything(level: int, set_to_none: bool, held: bool) -> None:
    for values in run_ranks(cleared, 2, level, set_to_none, held):
        assert values == [2.0] * 15


def held_back_beside_others(level: int) -> tuple[list[float], list[float]]:
    """Every micro-batch has the gradient 1 for every element, a penalty on the shards 3, and one pass fails."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    assert isinstance(parameter, DistributedParameter)
    x = torch.ones(1, 3) / runtime.world_size()

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    with no_sync(block):
        failing = x.clone().requires_grad_()
        failing.register_hook(fail)
        with pytest.raises(InterruptedError):
            block(failing).sum().backward()
        block.zero_grad()
        (block(x).sum() + 3 * parameter.sum()).backward()
        (asked,) = torch.autograd.grad(block(x).sum(), [parameter])
    block(x).sum().backward()
    assert parameter.grad is not None
    return parameter.gather_like(asked).flatten().tolist(), parameter.gather_like(parameter.grad).flatten().tolist()


@pytest.mark.parametrize("level", [0, 1])
def test_gradients_held_back_stay_whatever_else_is_differentiated(level: int) -> None:
    for asked, sums in run_ranks(held_back_beside_others, 2, level):
        assert asked == [1.0] * 15 and sums == [5.0] * 15


def left_by_a_frozen_parameter(level: int, held: bool) -> list[float]:
    block = Block(nn.Linear(3, 3), zero_level=level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3)
    block(x).sum().backward()
    bias.requires_grad_(False)  # its gradient stays, as in torch
    weight.grad = None
    with no_sync(block) if held else nullcontext():
        block(x).sum().backward()
    if held:
        block(x).sum().backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), bias.grad is not None]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_left_by_a_parameter_that_was_frozen_is_in_nobodys_way(level: int, held: bool) -> None:
    for values in run_ranks(left_by_a_frozen_parameter, 2, level, held):
        assert values == [4.0 if held else 2.0] * 9 + [True]


class TwoScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


def gradients_after(
    actions: str, model: TwoScales, hold: Callable[[], Any], factor: float
) -> list[torch.Tensor | None]:
    """h: a backward pass under ``hold``; s: one without it; n, z: an optimizer of b clears; f, u: b is frozen, unfrozen."""
    optimizer = torch.optim.SGD([model.b], lr=0.0)
    for number, action in enumerate(actions):
        if action in "hs":
            with hold() if action == "h" else nullcontext():
                model(torch.tensor(factor * 2.0**number)).backward()
        elif action in "nz":
            optimizer.zero_grad(set_to_none=action == "n")
        else:
            model.b.requires_grad_(action == "u")
    return [model.a.grad, model.b.grad]


def gradients_of_shards_after(actions: str, level: int) -> list[torch.Tensor | None]:
    block = Block(TwoScales(), False, level)
    gradients_after(actions, block, lambda: no_sync(block), 1 / runtime.world_size())  # type: ignore[arg-type]
    return [full_gradient(parameter) for parameter in block.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("level", [0, 1])
def test_gradients_held_back_are_those_of_torch_though_one_parameter_is_cleared_or_frozen(
    world_size: int, level: int
) -> None:
    for actions in ("hnhs", "hzhs", "hnhnhs", "hfs", "hfhs", "hfhus", "hfsnus", "hfnus", "hnfhs", "shns"):
        expected = gradients_after(actions, TwoScales(), nullcontext, 1.0)
        for found in run_ranks(gradients_of_shards_after, world_size, actions, level):
            torch.testing.assert_close(found, expected, msg=f"{actions}: {found}, not {expected}")


def cleared_while_frozen(level: int, dtype: torch.dtype) -> list[float]:
    block = Block(nn.Linear(3, 3, dtype=dtype), zero_level=level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3, dtype=dtype) / runtime.world_size()
    block(x).sum().backward()
    bias.requires_grad_(False)
    block(x).sum().backward()
    bias.grad = None  # another optimizer's zero_grad
    bias.requires_grad_(True)
    block(x).sum().backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), *bias.gather_like(bias.grad).tolist()]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_cleared_while_its_parameter_is_frozen_does_not_come_back(level: int, dtype: torch.dtype) -> None:
    for values in run_ranks(cleared_while_frozen, 2, level, dtype):
        assert values == [3.0] * 9 + [2.0] * 3  # the gradient of the bias is 1 on each rank


def frozen_in_the_first_call(level: int, use_checkpoint: bool) -> list[float]:
    """In the first of two calls of a backward pass the bias was frozen."""
    block = Block(nn.Linear(3, 3), use_checkpoint, level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3) / runtime.world_size()
    bias.requires_grad_(False)
    first = block(x).sum()
    bias.requires_grad_(True)
    (first + block(x).sum()).backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), *bias.gather_like(bias.grad).tolist()]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_parameter_frozen_in_one_of_two_calls_has_the_gradient_of_the_other(level: int, use_checkpoint: bool) -> None:
    for values in run_ranks(frozen_in_the_first_call, 2, level, use_checkpoint):
        assert values == [2.0] * 9 + [2.0] * 3  # the gradient of the bias is 1 on each rank


class Scaled(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def large_and_small(level: int, reduce_dtype: Any) -> list[float]:
    """Of each element one rank has the gradient 256, another one for each, and the others 1."""
    block = Block(Scaled(), False, level, reduce_dtype=reduce_dtype)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    x[:, runtime.rank()] = 256
    block(x.flatten()).float().sum().backward()
    (parameter,) = block.parameters()
    return parameter.gather_like(parameter.grad).tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", ["fp32-sum", "fp32"])
def test_half_gradients_are_summed_over_ranks_in_float32(level: int, reduce_dtype: str) -> None:
    # 259, rounded once. In bfloat16 256 + 1 is 256: whatever the order of the sums, some element would come to less.
    for values in run_ranks(large_and_small, 4, level, reduce_dtype):
        assert values == [260.0] * 8


def held_and_not(level: int, is_first_held: bool) -> list[float]:
    """One backward pass of two calls, of which one was held back. Every call has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3) / runtime.world_size()
    with no_sync(block) if is_first_held else nullcontext():
        first = block(x).sum()
    with nullcontext() if is_first_held else no_sync(block):
        second = block(x).sum()
    (first + second).backward()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("is_first_held", [False, True])
def test_a_pass_that_reduces_leaves_nothing_held_back(level: int, is_first_held: bool) -> None:
    for values in run_ranks(held_and_not, 2, level, is_first_held):
        assert values == [2.0] * 15


def watched_from_the_second_pass(level: int) -> tuple[list[float], list[float]]:
    """The first pass is held back, and then somebody begins to watch. Every pass has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    x, seen = torch.ones(1, 3) / runtime.world_size(), []
    with no_sync(block):
        block(x).sum().backward()
    parameter.register_hook(lambda grad: seen.append(grad.clone()))
    block(x).sum().backward()
    return [parameter.gather_like(grad).flatten().tolist() for grad in (*seen, parameter.grad)]  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize("level", [0, 1])
def test_who_begins_to_watch_sees_what_was_held_back(level: int) -> None:
    for seen, grad in run_ranks(watched_from_the_second_pass, 2, level):
        assert seen == grad == [2.0] * 15


def failed_while_held(level: int) -> list[list[float]]:
    """A held-back pass fails when the second of two blocks has held its gradients back; the first one never does."""
    blocks = [Block(nn.Linear(3, 3, bias=False), zero_level=level) for _ in range(2)]
    for block in blocks:
        with torch.no_grad():
            block.load_state_dict({"weight": torch.eye(3)})
    x = torch.ones(1, 3) / runtime.world_size()

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    with no_sync(nn.ModuleList(blocks)):
        between = blocks[0](x) * 1
        passed = blocks[1](between * 1)
        between.register_hook(fail)
        with pytest.raises(InterruptedError):
            passed.sum().backward()
    blocks[1](blocks[0](x)).sum().backward()
    return [block.weight.gather_like(block.weight.grad).unique().tolist() for block in blocks]


@pytest.mark.parametrize("level", [0, 1])
def test_what_a_failed_pass_held_back_is_dropped(level: int) -> None:
    for found in run_ranks(failed_while_held, 2, level):
        assert found == [[1.0], [1.0]]


def never_reduced(level: int) -> list[float]:
    """All micro-batches of a step are held back, and an optimizer of torch steps without a manager."""
    block = Block(nn.Linear(3, 3, bias=False), zero_level=level)
    block.load_state_dict({"weight": torch.zeros(3, 3)})
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    with no_sync(block):
        for _ in range(3):
            block(torch.ones(1, 3) / runtime.world_size()).sum().backward()
    optimizer.step()
    return block.weight.gather().flatten().tolist()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_step_after_nothing_but_held_back_passes_uses_them(level: int) -> None:
    for values in run_ranks(never_reduced, 2, level):
        assert values == [-1.5] * 9


def penalty_in_every_pass(level: int) -> list[float]:
    """Every pass has the gradient 1 for every element, and a penalty on the shards 3."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3, dtype=torch.bfloat16) / runtime.world_size()
    for _ in range(3):
        (block(x).sum() + 3 * parameter.sum()).backward()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_penalty_on_half_shards_adds_to_the_sum_of_every_pass(level: int) -> None:
    for values in run_ranks(penalty_in_every_pass, 2, level):
        assert values == [12.0] * 15


def asked_for_some(level: int) -> list[float]:
    """Every micro-batch has the gradient 1 for every element, and all but the last are held back."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level, use_checkpoint=False)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3, dtype=torch.bfloat16) / runtime.world_size()
    for micro in range(300):
        with no_sync(block) if micro < 299 else nullcontext():
            block(x).sum().backward(inputs=[parameter])
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1])
def test_what_backward_is_asked_for_is_held_back_in_float32_too(level: int) -> None:
    for values in run_ranks(asked_for_some, 2, level):
        assert values == [300.0] * 15
