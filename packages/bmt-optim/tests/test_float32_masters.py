"""Float32 masters of any elementwise optimizer: ``add_optimizer(optimizer, masters=True)``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bmt_core
from bmt_core.errors import CheckpointError, ConfigError
from bmt_optim import AdamOptimizer, OptimManager
from bmt_optim.adam.parameter_state import MASTER
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells

SHAPES = [(5, 3), (7,), (), (1,)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
}


def whole_values(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """The whole gradients of a step; every third step leaves the second parameter out."""
    torch.manual_seed(100 + step)
    return [torch.randn(shape).bfloat16() for shape in SHAPES]


def has_gradient(number: int, step: int) -> bool:
    return number != 1 or step % 3 != 2


class Plain:
    """Masters by hand, in one process and plain torch."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.masters = [nn.Parameter(value.float()) for value in whole_values(dtype)]
        self.optimizer = OPTIMIZERS[name](self.masters)

    def step(self, number: int) -> list[torch.Tensor]:
        for i, (master, grad) in enumerate(zip(self.masters, gradients(number), strict=True)):
            master.grad = grad.to(self.dtype).float() if has_gradient(i, number) else None
        self.optimizer.step()
        return [master.detach().to(self.dtype) for master in self.masters]


class Sharded:
    """The same with this rank's parts."""

    def __init__(self, name: str, dtype: torch.dtype, **options: Any) -> None:
        self.dtype = dtype
        self.parameters = [DistributedParameter(value) for value in whole_values(dtype)]
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.manager = OptimManager(**options)
        self.manager.add_optimizer(self.optimizer, masters=True)

    def step(self, number: int) -> list[torch.Tensor]:
        for i, (p, grad) in enumerate(zip(self.parameters, gradients(number), strict=True)):
            p.grad = (
                p.local_part(grad.to(self.dtype)) * self.manager.loss_scale
                if has_gradient(i, number)
                else None
            )
        self.manager.step()
        self.manager.zero_grad()
        return [p.gather().detach() for p in self.parameters]


@on_ranks(4)
@cells("dtype", [torch.bfloat16, torch.float16])
@cells("name", list(OPTIMIZERS))
def test_parts_are_masters_of_plain_torch_rounded(name: str, dtype: torch.dtype) -> None:
    plain, sharded = (
        Plain(name, dtype),
        Sharded(name, dtype, loss_scale=1024 if dtype == torch.float16 else None),
    )
    before = [value.float() for value in whole_values(dtype)]
    for step in range(12):
        expected, found = plain.step(step), sharded.step(step)
        for p, whole, rounded in zip(sharded.parameters, plain.masters, found, strict=True):
            if p in sharded.optimizer.state:
                master = p.gather_like(sharded.optimizer.state[p][MASTER])
                torch.testing.assert_close(master, whole.detach(), rtol=1e-6, atol=1e-7)
            assert rounded.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    moved = [
        not torch.equal(p.gather_like(sharded.optimizer.state[p][MASTER]), old)
        for p, old in zip(sharded.parameters, before, strict=True)
    ]
    assert all(moved)


@on_ranks(2)
@cells("gathered", [False, True])
@cells("name", list(OPTIMIZERS))
def test_a_resumed_training_goes_on_bit_for_bit(name: str, gathered: bool) -> None:
    whole, first = Sharded(name, torch.bfloat16), Sharded(name, torch.bfloat16)
    for step in range(4):
        whole.step(step)
        first.step(step)
    resumed = Sharded(name, torch.bfloat16)
    for p, saved in zip(resumed.parameters, first.parameters, strict=True):
        with torch.no_grad():
            p.copy_(saved)
    resumed.manager.load_state_dict(first.manager.state_dict(gather_opt=gathered))
    for step in range(4, 8):
        assert all(map(torch.equal, resumed.step(step), whole.step(step)))
        for p, twin in zip(resumed.parameters, whole.parameters, strict=True):
            assert torch.equal(
                resumed.optimizer.state[p][MASTER], whole.optimizer.state[twin][MASTER]
            )


@on_ranks(2)
@cells("gathered", [False, True])
@cells("name", list(OPTIMIZERS))
def test_moments_of_steps_without_masters_go_on_in_float32(name: str, gathered: bool) -> None:
    first, resumed = (DistributedParameter(torch.ones(5).bfloat16()) for _ in range(2))
    managers = OptimManager(), OptimManager()
    for p, manager in zip((first, resumed), managers, strict=True):
        manager.add_optimizer(OPTIMIZERS[name]([p]), masters=p is resumed)
    first.grad = torch.ones_like(first)
    managers[0].step()
    managers[1].load_state_dict(managers[0].state_dict(gather_opt=gathered))
    resumed.grad = torch.ones_like(resumed)
    managers[1].step()
    state = managers[1].optimizers[0].state[resumed]
    assert {value.dtype for value in state.values()} == {torch.float32}


@on_ranks(1)
def test_masters_that_the_optimizer_has_loaded_and_rounded_are_refused() -> None:
    sharded = Sharded("sgd", torch.bfloat16)
    sharded.step(0)
    state = sharded.manager.state_dict()
    sharded.optimizer.load_state_dict(copy.deepcopy(sharded.optimizer.state_dict()))
    with pytest.raises(CheckpointError, match=r"become torch\.bfloat16.* of the OptimManager"):
        sharded.step(1)
    sharded.manager.load_state_dict(state)
    sharded.step(1)


@on_ranks(1)
def test_a_step_without_memory_for_gradients_loses_no_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded, twin = Sharded("sgd", torch.bfloat16), Sharded("sgd", torch.bfloat16)
    calls = iter([None, torch.OutOfMemoryError("out of memory")])

    def failing(_: torch.Tensor) -> None:
        if (error := next(calls)) is not None:
            raise error

    for each in (sharded, twin):
        each.step(0)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr("bmt_optim.float32_masters.float32_sum_of", failing)
        sharded.step(1)
    assert all(map(torch.equal, sharded.step(1), twin.step(1)))


@on_ranks(2)
def test_a_weight_that_was_written_is_where_its_master_goes_on() -> None:
    sharded = Sharded("sgd", torch.bfloat16)
    sharded.step(0)
    with torch.no_grad():
        sharded.parameters[0].fill_(3.0)
    sharded.step(1)
    master = sharded.optimizer.state[sharded.parameters[0]][MASTER]
    has_moved = not torch.equal(master, torch.full_like(master, 3.0))
    assert (torch.all((master - 3.0).abs() < 1e-2) and has_moved) or not master.numel()


@on_ranks(2)
def test_a_step_with_an_overflow_changes_nothing() -> None:
    sharded = Sharded("adamw", torch.float16, loss_scale=1024)
    before = sharded.step(0)
    masters = [sharded.optimizer.state[p][MASTER].clone() for p in sharded.parameters]
    for p in sharded.parameters:
        p.grad = torch.full_like(p, float("inf"))
    sharded.manager.step()
    assert sharded.manager.skipped_steps == 1 and sharded.manager.loss_scale == 512
    assert all(
        torch.equal(p.gather(), value) for p, value in zip(sharded.parameters, before, strict=True)
    )
    for p, master in zip(sharded.parameters, masters, strict=True):
        assert torch.equal(sharded.optimizer.state[p][MASTER], master)


@on_ranks(2)
def test_half_weights_without_masters_are_warned_about_once_on_rank_0() -> None:
    for masters, dtype, expected in (
        (False, torch.bfloat16, 1),
        (True, torch.bfloat16, 0),
        (False, torch.float32, 0),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            OptimManager().add_optimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(3, dtype=dtype))], lr=1.0), masters=masters
            )
        assert sum("masters=True" in str(warning.message) for warning in caught) == (
            expected if bmt_core.rank() == 0 else 0
        )


@on_ranks(1)
def test_optimizers_that_have_masters_or_no_groups_of_torch_are_refused() -> None:
    with pytest.raises(ConfigError, match="AdamOptimizer says itself"):
        OptimManager().add_optimizer(AdamOptimizer([nn.Parameter(torch.ones(3))]), masters=True)
