"""Every schedule against its formula, corner cases of warm-up and end, state, and
parameter groups.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, lr_scheduler
from bmt_optim.lr_scheduler import (
    WSD,
    Cosine,
    Exponential,
    Linear,
    Noam,
    NoDecay,
    WarmupLRScheduler,
)

BMTRAIN = [NoDecay, Linear, Cosine, Exponential, Noam]
ALL: list[type[WarmupLRScheduler]] = [*BMTRAIN, WSD]


def optimizer_of(*lrs: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)]
    return torch.optim.SGD(groups)


def formula(kind: type[WarmupLRScheduler], s: float, w: float, e: float, n: int) -> float:
    if n < w:
        return s / math.sqrt(w) * n / w if kind is Noam else s * n / w
    if kind is NoDecay:
        return s
    if kind is Linear:
        return 0.0 if n >= e else max(0.0, s * (e - n) / (e - w))
    if kind is Cosine:
        return s * 0.5 * (1 + math.cos(math.pi * min(1.0, (n - w) / max(1, e - w))))
    if kind is Exponential:
        return s * 0.95 ** (n - w)
    assert kind is Noam
    return s / math.sqrt(max(n, 1))


@pytest.mark.parametrize("kind", BMTRAIN)
@given(
    s=st.floats(1e-6, 10),
    w=st.one_of(st.integers(0, 50), st.floats(0, 50)),
    length=st.one_of(st.integers(0, 100), st.floats(0, 100)),
    n=st.integers(0, 200),
)
def test_rate_follows_the_formula(
    kind: type[WarmupLRScheduler], s: float, w: float, length: float, n: int
) -> None:
    optimizer = optimizer_of()
    schedule = kind(optimizer, start_lr=s, warmup_iter=w, end_iter=w + length, num_iter=n)
    expected = formula(kind, s, w, w + length, n)
    assert schedule.current_lr == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert schedule.get_lr() == schedule.current_lr == optimizer.param_groups[0]["lr"]
    assert 0 <= schedule.current_lr <= s * (1 + 1e-9)


@pytest.mark.parametrize("kind", ALL)
def test_steps_one_by_one_equal_jumps(kind: type[WarmupLRScheduler]) -> None:
    walking = kind(optimizer_of(), 0.5, 3, 12)
    for n in range(20):
        assert walking.num_iter == n
        assert walking.current_lr == kind(optimizer_of(), 0.5, 3, 12, n).current_lr
        jumping = kind(optimizer_of(), 0.5, 3, 12)
        jumping.step(n)
        assert jumping.current_lr == walking.current_lr
        walking.step()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("warmup", "end"), [(0, 0), (0, 5), (5, 5), (2.5, 7.5), (10, 3)])
def test_no_warmup_and_no_decay_are_fine(
    kind: type[WarmupLRScheduler], warmup: float, end: float
) -> None:
    schedule = kind(optimizer_of(), 0.1, warmup, end)
    for _ in range(20):
        assert math.isfinite(schedule.current_lr) and 0 <= schedule.current_lr <= 0.1
        schedule.step()


@pytest.mark.parametrize("kind", ALL)
def test_parameter_groups_keep_their_ratios(kind: type[WarmupLRScheduler]) -> None:
    optimizer = optimizer_of(0.2, 0.02, 0.4)
    schedule = kind(optimizer, 0.5, 3, 12)
    for _ in range(15):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == schedule.current_lr
        assert rates[1:] == pytest.approx([rates[0] * 0.1, rates[0] * 2.0])
        schedule.step()


def test_ratios_survive_a_second_scheduler_during_warmup_and_a_resume() -> None:
    optimizer = optimizer_of(0.2, 0.02)
    first = Linear(optimizer, 0.5, 3, 12)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    second = Linear(optimizer, 0.5, 3, 12, 3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
    second.load_state_dict(first.state_dict())
    second.step(3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_a_group_at_rate_0_stays_there_and_the_others_keep_their_ratios() -> None:
    optimizer = optimizer_of(0.0, 0.2, 0.02)
    schedule = Linear(optimizer, 0.5, 3, 12)
    for n, rate in ((3, 0.5), (0, 0.0), (9, 0.5 / 3)):
        schedule.step(n)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.0, rate, 0.1 * rate]
        )
    resumed = Linear(optimizer_of(0.0, 0.3, 0.3), 0.5, 3, 12)
    resumed.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in resumed.optimizer.param_groups] == pytest.approx(
        [0.0, 0.5 / 3, 0.05 / 3]
    )


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer, torch.optim.AdamW])
def test_a_rate_that_is_a_tensor_trains_as_a_number_does_and_stays_a_tensor(kind: Any) -> None:
    results = []
    for lr in (0.5, torch.tensor(0.5)):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = (
            kind([p], lr=lr, foreach=False) if kind is torch.optim.AdamW else kind([p], lr=lr)
        )
        manager = OptimManager()
        manager.add_optimizer(optimizer, Linear(optimizer, 0.5, 3, 12))
        for n in range(6):
            p.grad = torch.tensor([1.0, -2.0, 0.5])
            manager.step()
            if n == 3:
                state = manager.state_dict(gather_opt=True)
            if n == 4:
                manager.load_state_dict(manager.state_dict(gather_opt=True))
        saved_rate = state["logical"]["groups"][0][0]["lr"]
        assert float(saved_rate) == pytest.approx(0.5 * 8 / 9)  # of the fourth step still
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_group_added_later_takes_part() -> None:
    optimizer = optimizer_of(0.2)
    schedule = NoDecay(optimizer, 1.0, 0, 10)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("kind", ALL)
def test_state_holds_every_constant(kind: type[WarmupLRScheduler]) -> None:
    options: dict[str, Any] = {}
    if kind is Exponential:
        options = {"gamma": 0.7}
    if kind is WSD:
        options = {"decay_iter": 4, "final_ratio": 0.1, "decay": "sqrt"}
    original = kind(optimizer_of(0.2, 0.1), 0.5, 3, 12, 5, **options)
    state = original.state_dict()
    assert {"start_lr", "warmup_iter", "end_iter", "num_iter", *options} <= set(state)
    optimizer = optimizer_of(1.0, 1.0)
    resumed = kind(optimizer, 9.0, 1, 2)
    resumed.load_state_dict(state)
    for _ in range(10):
        assert resumed.current_lr == original.current_lr
        assert optimizer.param_groups[1]["lr"] == pytest.approx(original.current_lr / 2)
        original.step()
        resumed.step()


def test_states_of_bmtrain_load() -> None:
    schedule = Exponential(optimizer_of(), 1.0, 0, 10, gamma=0.5)
    schedule.load_state_dict({"start_lr": 2.0, "warmup_iter": 0, "end_iter": 10, "num_iter": 3})
    assert schedule.current_lr == pytest.approx(2.0 * 0.5**3)


@pytest.mark.parametrize(
    ("decay", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_wsd_warms_up_stays_and_decays(decay: Any, middle: float) -> None:
    schedule = WSD(optimizer_of(), 2.0, 10, 100, decay_iter=20, final_ratio=0.1, decay=decay)
    rates = []
    for _ in range(110):
        rates.append(schedule.current_lr)
        schedule.step()
    assert rates[5] == pytest.approx(1.0)
    assert set(rates[10:81]) == {2.0}
    assert rates[90] == pytest.approx(2.0 * (0.1 + 0.9 * middle))
    assert rates[100:] == pytest.approx([0.2] * 10)
    assert all(a >= b for a, b in itertools.pairwise(rates[80:]))


def test_wsd_decays_for_a_tenth_by_default_and_refuses_unknown_shapes() -> None:
    schedule = WSD(optimizer_of(), 1.0, 0, 200)
    schedule.step(180)
    assert schedule.current_lr == 1.0
    schedule.step(190)
    assert schedule.current_lr == pytest.approx(0.5)
    with pytest.raises(ValueError, match="decay must be 'linear', 'sqrt' or 'cosine', not 'steps'"):
        WSD(optimizer_of(), 1.0, 0, 200, decay="steps")  # type: ignore[arg-type]


def test_all_schedules_are_public() -> None:
    assert {kind.__name__ for kind in ALL} | {"WarmupLRScheduler"} == set(lr_scheduler.__all__)


class FallsByFactor(WarmupLRScheduler):
    """As a user writes one: the rate falls by a factor with each step after a quadratic warm-up."""

    constants = (*WarmupLRScheduler.constants, "factor")
    factor = 0.5

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr * (num_iter / self.warmup_iter) ** 2

    def get_lr_decay(self, num_iter: int) -> float:
        return float(self.start_lr * self.factor ** (num_iter - self.warmup_iter))


def test_a_schedule_of_ones_own() -> None:
    scheduler = FallsByFactor(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]), 8.0, 2, 10)
    rates = [scheduler.current_lr]
    for _ in range(4):
        scheduler.step()
        rates.append(scheduler.current_lr)
    assert rates == [0, 2, 8, 4, 2] and scheduler.state_dict()["factor"] == 0.5
    with pytest.raises(NotImplementedError, match="WarmupLRScheduler must define get_lr_decay"):
        WarmupLRScheduler(optimizer_of(1.0), 8.0, 0, 10)
