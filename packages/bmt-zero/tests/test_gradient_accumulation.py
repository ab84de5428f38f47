"""Gradients of several backward passes: summed in float32, held back under ``no_sync``, cleared, of
frozen parameters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import Interrupt, X, grads_of, interrupt, line

from bmt_core.run.runtime import rank, world_size
from bmt_params.gradient_sum import float32_sum_of
from bmt_testing import on_ranks
from bmt_zero import Block, no_sync
from cells import cells


def layer(level: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A Block of a weight of 15 elements."""
    return Block(nn.Linear(3, 5, bias=False, dtype=dtype), zero_level=level, **options)


def ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a layer is called with that is to have the gradient 1 for every element, summed over
    the ranks.
    """
    return torch.ones(1, 3, dtype=dtype) / world_size()


def held(block: nn.Module, is_held: bool = True) -> AbstractContextManager[Any]:
    return no_sync(block) if is_held else nullcontext()


def values(parameter: Any) -> list[float]:
    """The elements of the whole gradient."""
    found: list[float] = parameter.gather_like(parameter.grad).flatten().tolist()
    return found


@on_ranks(1, 2)
@cells("level", [0, 1, 3])
@cells("is_held", [False, True])
@cells("is_asked_for", [False, True])
def test_bfloat16_gradients_accumulate_in_float32(
    level: int, is_held: bool, is_asked_for: bool
) -> None:
    """The first gradient is 256, and 256 + 1 is 256 in bfloat16."""
    block = layer(level, torch.bfloat16, use_checkpoint=False)
    (parameter,) = block.parameters()
    for micro_batch in range(9):
        with held(block, is_held and micro_batch < 8):
            loss = block(ones(torch.bfloat16)).sum() * (1 if micro_batch else 256)
            loss.backward(inputs=[parameter] if is_asked_for else None)
    assert parameter.grad.dtype == torch.bfloat16 and values(parameter) == [264.0] * 15


@on_ranks(1, 2)
@cells("level", [0, 1, 3])
def test_masters_get_the_sum_before_it_was_rounded(level: int) -> None:
    block = layer(level, torch.bfloat16, use_checkpoint=False)
    (parameter,) = block.parameters()
    for factor in (256, 1):
        (block(ones(torch.bfloat16)).sum() * factor).backward()
    total = float32_sum_of(parameter.grad)
    assert total is not None and {*total.tolist()} <= {257.0}  # empty on a rank without a part
    assert values(parameter) == [256.0] * 15


@on_ranks(2)
@cells("level", [0, 1, 3])
def test_a_gradient_held_back_beside_one_that_is_reduced_is_not_lost(level: int) -> None:
    """What the outer checkpoint calls again is called inside of ``no_sync``, what it is an input of
    was called before.
    """
    plain, block = line(), Block(line(), zero_level=level)
    for module in (plain, block):
        for number in range(3):
            x = (number + 1) * X.clone().requires_grad_()
            loss = module(checkpoint(module, x, use_reentrant=True)).square().sum()
            with held(module, module is block and number < 2):
                loss.backward()
    torch.testing.assert_close(grads_of(block), grads_of(plain, times=2))


@on_ranks(2)
@cells("level", [0, 1])
def test_gradients_held_back_stay_whatever_else_is_differentiated(level: int) -> None:
    """One pass fails, one has a penalty of gradient 3 on the shards, one is asked for gradients by
    torch.autograd.grad.
    """
    block = layer(level)
    (parameter,) = block.parameters()
    with no_sync(block):
        failing = ones().requires_grad_()
        failing.register_hook(interrupt)
        with pytest.raises(Interrupt):
            block(failing).sum().backward()
        block.zero_grad()
        (block(ones()).sum() + (3 * parameter).sum()).backward()
        (asked,) = torch.autograd.grad(block(ones()).sum(), [parameter])
    block(ones()).sum().backward()
    assert parameter.gather_like(asked).flatten().tolist() == [1.0] * 15
    assert values(parameter) == [5.0] * 15


@on_ranks(2)
@cells("level", range(4))
@cells("is_first_held", [False, True])
def test_a_pass_of_two_calls_of_which_one_is_held_back_leaves_nothing_held_back(
    level: int, is_first_held: bool
) -> None:
    block = layer(level)
    with held(block, is_first_held):
        first = block(ones()).sum()
    with held(block, not is_first_held):
        second = block(ones()).sum()
    (first + second).backward()
    assert values(block.weight) == [2.0] * 15


@on_ranks(2)
@cells("level", [0, 1])
def test_who_begins_to_watch_sees_what_was_held_back(level: int) -> None:
    block = layer(level)
    (parameter,) = block.parameters()
    seen: list[torch.Tensor] = []
    with no_sync(block):
        block(ones()).sum().backward()
    parameter.register_hook(lambda grad: seen.append(grad.clone()))
    block(ones()).sum().backward()
    (grad,) = seen
    assert parameter.gather_like(grad).flatten().tolist() == values(parameter) == [2.0] * 15


@on_ranks(2)
@cells("dtype", [torch.float32, torch.bfloat16])
@cells("level", range(4))
def test_a_penalty_on_shards_adds_to_the_sum_of_every_pass(level: int, dtype: torch.dtype) -> None:
    block = Block(nn.Linear(3, 5, dtype=dtype), zero_level=level)
    for _ in range(3):  # autograd adds to .grad while a reduction is under way
        (block(ones(dtype)).sum() + sum((3 * part).sum() for part in block.parameters())).backward()
    assert values(block.weight) == [3 * (1.0 + 3)] * 15
    assert values(block.bias) == [3 * (2.0 + 3)] * 5  # its gradient is 1 on each rank


class TwoScales(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


CLEARED = {"m": ("a", True), "y": ("a", False), "n": ("b", True), "z": ("b", False)}
SEQUENCES = [
    *["hnhs", "hzhs", "hnhnhs", "hfs", "hfhs", "hfhus", "hfsnus", "hfnus", "hnfhs", "shns"],
    *["hhhnms", "hhhzys", "sssnms", "ssszys"],  # all is cleared
    *["sfms", "sfmhs", "sfsnus"],  # what is frozen keeps its gradient, or it is cleared meanwhile
]


@on_ranks(1, 2)
@cells("level", range(4))
@cells("dtype", [torch.float32, torch.bfloat16])
def test_gradients_held_back_cleared_or_of_frozen_parameters_are_those_of_torch(
    level: int, dtype: torch.dtype
) -> None:
    """h: a pass that is held back; s: one that is not; m, y, n, z: an optimizer of a or of b clears
    its gradients, to None or to zero; f, u: b is frozen, unfrozen.
    """
    for actions in SEQUENCES:
        plain, block = TwoScales(dtype), Block(TwoScales(dtype), False, level)
        for model, factor in ((plain, 1.0), (block, 1 / world_size())):
            parameters = dict(model.named_parameters())
            for number, action in enumerate(actions):
                if action in "hs":
                    with held(model, action == "h" and model is block):
                        model(torch.tensor(factor * 2.0**number, dtype=dtype)).backward()
                elif action in CLEARED:
                    name, to_none = CLEARED[action]
                    torch.optim.SGD([parameters[name]], lr=0.0).zero_grad(set_to_none=to_none)
                else:
                    parameters["b"].requires_grad_(action == "u")
        found, expected = grads_of(block), grads_of(plain)
        torch.testing.assert_close(found, expected, msg=f"{actions}: {found}, not {expected}")


@on_ranks(2)
@cells("level", range(4))
@cells("use_checkpoint", [False, True])
def test_a_parameter_frozen_in_one_of_two_calls_has_the_gradient_of_the_other(
    level: int, use_checkpoint: bool
) -> None:
    block = Block(nn.Linear(3, 3), use_checkpoint, level)
    weight, bias = block.parameters()
    bias.requires_grad_(False)
    first = block(ones()).sum()
    bias.requires_grad_(True)
    (first + block(ones()).sum()).backward()
    assert values(weight) == [2.0] * 9
    assert values(bias) == [2.0] * 3  # its gradient is 1 on each rank


class Scaled(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@on_ranks(4)
@cells("level", range(4))
@cells("reduce_dtype", ["fp32-sum", "fp32"])
def test_half_gradients_are_summed_over_ranks_in_float32(level: int, reduce_dtype: Any) -> None:
    """Of each element one rank has the gradient 256, another one for each, and the others 1."""
    block = Block(Scaled(torch.bfloat16), False, level, reduce_dtype=reduce_dtype)
    x = torch.ones(32, 4, dtype=torch.bfloat16)
    x[:, rank()] = 256
    block(x.flatten()).float().sum().backward()
    # 259, rounded once. In bfloat16 256 + 1 is 256: whatever the order of the sums, some element
    # would come to less.
    assert values(block.weight) == [260.0] * 128


@on_ranks(2)
def test_a_step_that_reduces_held_back_gradients_keeps_no_memory_for_them() -> None:
    blocks: Any = nn.Sequential(
        *[Block(Scaled(torch.bfloat16), zero_level=level) for level in (0, 0, 3)]
    )
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1.0)
    with no_sync(blocks):
        blocks(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not blocks[0]._bmt_block.state.run.in_flight._kept


@on_ranks(2)
@cells("level", [0, 1, 3])
def test_sparse_gradients_are_added_to_those_of_other_passes(level: int) -> None:
    block = Block(nn.Embedding(4, 3, sparse=True), zero_level=level)
    (parameter,) = block.parameters()
    for rows in ([0, 3], [3, rank()]):
        block(torch.tensor(rows)).sum().backward()
    assert values(parameter) == [3.0] * 3 + [1.0] * 3 + [0.0] * 3 + [4.0] * 3


@on_ranks(2)
@cells("level", [0, 1, 3])
@cells("is_cleared", [False, True])
def test_a_penalty_on_a_gathered_weight_drops_only_what_was_cleared_before_it(
    level: int, is_cleared: bool
) -> None:
    block = layer(level)
    (parameter,) = block.parameters()
    with no_sync(block):
        block(ones()).sum().backward()
        if is_cleared:
            block.zero_grad()
        (3 * parameter.gather()).sum().div(world_size()).backward()
    block(ones()).sum().backward()
    assert values(parameter) == [(1.0 if is_cleared else 2.0) + 3] * 15
