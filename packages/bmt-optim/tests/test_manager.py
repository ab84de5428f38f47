"""``OptimManager`` with several optimizers and schedulers, and what it divides losses by."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from managed import Unaware, parameter

from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_core.run.topology import Topology
from bmt_optim import AdamOptimizer, OptimManager, available, create
from bmt_optim.lr_scheduler import Linear
from bmt_testing import on_ranks
from cells import cells


def test_several_optimizers_and_schedulers_step_together() -> None:
    ps = [parameter() for _ in range(3)]
    optimizers = [AdamOptimizer([ps[0]]), torch.optim.SGD([ps[1]], lr=0.1), Unaware([ps[2]])]
    schedule = Linear(optimizers[0], 0.1, 0, 10)
    torchs = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.5)
    manager = OptimManager(loss_scale=16)
    for optimizer, scheduler in zip(optimizers, [schedule, torchs, None], strict=True):
        manager.add_optimizer(optimizer, scheduler)
    assert manager.optimizers == optimizers and manager.lr_schedulers == [schedule, torchs, None]
    for _ in range(2):
        manager.zero_grad()
        manager.backward(sum(p.sum() for p in ps))
        manager.step()
    assert schedule.num_iter == 2 and optimizers[1].param_groups[0]["lr"] == pytest.approx(0.025)
    torch.testing.assert_close(ps[1].detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.1 - 0.05)
    torch.testing.assert_close(ps[2].detach(), torch.tensor([1.0, 2.0, 3.0]) - 0.2)
    manager.zero_grad()
    assert all(p.grad is None for p in ps)


def test_what_is_no_optimizer_or_is_added_twice_is_refused() -> None:
    manager = OptimManager()
    optimizer = AdamOptimizer([parameter()])
    manager.add_optimizer(optimizer)
    with pytest.raises(ValueError, match="added already"):
        manager.add_optimizer(optimizer)
    with pytest.raises(TypeError, match="param_groups"):
        manager.add_optimizer("adam")  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_scale", [None, 8])
def test_two_optimizers_of_one_parameter_are_refused_with_loss_scaling(
    loss_scale: float | None,
) -> None:
    p, manager = parameter(), OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(torch.optim.SGD([p], lr=1.0))
    second = torch.optim.SGD([p], lr=0.5)
    if loss_scale is not None:
        with pytest.raises(ConfigError, match="would divide its gradient by the loss scale"):
            manager.add_optimizer(second)
        return
    manager.add_optimizer(second)
    manager.backward(p.sum())
    manager.step()
    torch.testing.assert_close(p.detach(), parameter().detach() - 1.5)


@on_ranks(2)
@cells("loss_scale", [None, 8])
def test_a_step_without_an_optimizer_is_refused(loss_scale: float | None) -> None:
    p, manager = parameter(), OptimManager(loss_scale=loss_scale)
    for _ in range(2):
        manager.zero_grad()
        manager.backward(p.sum())
        with pytest.raises(
            ConfigError, match=r"no optimizer, so step\(\) would change .* Call add"
        ):
            manager.step()
    manager.add_optimizer(torch.optim.SGD([p], lr=0.5))
    manager.step()
    assert p[0] != 1.0


@pytest.mark.parametrize("kind", ["torch", "bmt"])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_scheduler_that_the_program_steps_too_is_warned_of_once(
    kind: str, is_deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmt_optim.manager._is_on_host", lambda flag: not is_deferred)
    p = parameter()
    optimizer = AdamOptimizer([p], lr=0.1)
    of_torch = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scheduler: Any = of_torch if kind == "torch" else Linear(optimizer, 0.1, 0, 100)
    manager = OptimManager(loss_scale=4)
    manager.add_optimizer(optimizer, scheduler)

    def step(gradient: float = 1.0) -> None:
        p.grad = torch.full((3,), gradient)
        manager.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()  # to where a training goes on
        for gradient in (1.0, math.inf, 1.0):
            step(gradient)
        state = manager.state_dict()
        step()
        manager.load_state_dict(state)
        step()
    scheduler.step()
    with pytest.warns(
        UserWarning, match=rf"^{type(scheduler).__name__} has been stepped .* by the program"
    ) as caught:
        step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
        step()


def test_a_scheduler_that_needs_a_metric_is_refused_before_any_step() -> None:
    optimizer, manager = AdamOptimizer([parameter()]), OptimManager()
    with pytest.raises(
        ConfigError, match=r"call scheduler\.step\(metrics\) yourself after manager\.step\(\)"
    ):
        manager.add_optimizer(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not manager.optimizers
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))


def test_optimizers_by_name() -> None:
    assert "adam" in available()
    optimizer = create("adam", [parameter()], lr=0.5)
    assert isinstance(optimizer, AdamOptimizer) and optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(Exception, match=r"No optimizer is named 'adan'\. Did you mean 'adam'"):
        create("adan", [parameter()])


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_grad_scale_that_divides_no_loss_is_refused(value: float) -> None:
    manager = OptimManager(grad_scale=2)
    with pytest.raises(ValueError, match=f"grad_scale must be a positive .* it is {value}"):
        OptimManager(grad_scale=value)
    with pytest.raises(ValueError, match="grad_scale"):
        manager.grad_scale = value
    assert manager.grad_scale == 2


@on_ranks(4, own_run=True)
def test_grad_scale_is_the_number_of_ranks_with_different_data() -> None:
    manager = OptimManager()
    assert manager.grad_scale == 4
    run = runtime.current()
    run.topology = Topology({"pp": 1, "dp": 2, "tp": 2}, run.rank, run.backend, same_data={"tp"})
    assert manager.grad_scale == 2 and OptimManager(grad_scale=7).grad_scale == 7
