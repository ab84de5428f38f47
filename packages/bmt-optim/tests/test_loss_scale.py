"""The loss scale of ``OptimManager``, and steps skipped because of gradients that are
not finite.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from managed import BAD, DTYPES, KINDS, managed, no_host_reads, parameter

from bmt_core.errors import CheckpointError
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_optim.loss_scale import LossScale
from bmt_optim.lr_scheduler import Linear
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells
from pairwise import pairwise


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the manager leave the flag on the device, as it does on CUDA."""
    monkeypatch.setattr("bmt_optim.manager._is_on_host", lambda flag: False)


# Scaling


def test_loss_is_multiplied_by_loss_scale_over_grad_scale() -> None:
    loss = torch.tensor(3.0)
    assert OptimManager().scale_loss(loss) == 3.0
    assert OptimManager(loss_scale=1024).scale_loss(loss) == 3072.0
    assert OptimManager(loss_scale=1024, grad_scale=4).scale_loss(loss) == 768.0
    manager = OptimManager()
    assert (manager.loss_scale, manager.loss_scale_enabled, manager.grad_scale) == (1, False, 1)
    assert OptimManager(loss_scale=8).loss_scale_enabled


def test_loss_scale_may_be_assigned() -> None:
    manager = managed(parameter(), loss_scale=1024, loss_scale_steps=1)
    manager.loss_scale = 64
    assert manager.loss_scale == 64 and manager.scale_loss(torch.tensor(2.0)) == 128.0
    with pytest.raises(ValueError, match="loss_scale must be a positive number or None, it is -1"):
        manager.loss_scale = -1
    manager.loss_scale = None
    assert not manager.loss_scale_enabled
    manager.loss_scale = manager.loss_scale  # 1, as it reads without scaling
    assert not manager.loss_scale_enabled
    manager.loss_scale = 8
    assert manager.loss_scale_enabled and manager.loss_scale == 8


def scales(manager: OptimManager, p: torch.nn.Parameter, *, bad: bool, steps: int = 1) -> float:
    for _ in range(steps):
        p.grad = torch.full((3,), math.nan if bad else 1.0)
        manager.step()
    return manager.loss_scale


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_settings_of_the_scale_may_be_read_and_assigned_under_bmtrains_names() -> None:
    p = parameter()
    manager = managed(p, loss_scale=1024)
    assert (manager.loss_scale_factor, manager.loss_scale_steps) == (2, 1024)
    assert (manager.min_loss_scale, manager.max_loss_scale) == (1, math.inf)
    manager.loss_scale_factor, manager.loss_scale_steps = 4, 3
    assert scales(manager, p, bad=False, steps=2) == 1024 and scales(manager, p, bad=False) == 4096
    manager.max_loss_scale = 5000
    assert scales(manager, p, bad=False, steps=3) == 5000
    manager.min_loss_scale = 2000
    assert scales(manager, p, bad=True, steps=2) == 2000
    state = manager.state_dict()
    assert [
        state[key]
        for key in ("loss_scale_factor", "loss_scale_steps", "min_loss_scale", "max_loss_scale")
    ] == [*(4, 3, 2000, 5000)]


class OfBmtrain(torch.optim.SGD):
    """Keeps what is multiplied by the loss scale, and hears of its changes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changes: list[tuple[float, float]] = []

    def _on_justify_scale(self, old_scale: float, new_scale: float) -> None:
        self.changes.append((old_scale, new_scale))


def test_an_optimizer_may_hear_of_a_changed_scale() -> None:
    p = parameter()
    optimizer = OfBmtrain([p], lr=0.1)
    manager = OptimManager(loss_scale=8, loss_scale_steps=1, max_loss_scale=16)
    manager.add_optimizer(optimizer)
    for bad in (math.inf, 1.0, 1.0, 1.0, math.nan):
        p.grad = torch.full((3,), bad)
        manager.step()
    assert optimizer.changes == [(8, 4), (4, 8), (8, 16), (16, 8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_scale", [None, 2.0**16])
def test_training_with_scaling_equals_training_without(kind: str, loss_scale: float | None) -> None:
    p, twin = parameter(), parameter()
    manager, plain = (
        managed(p, kind, loss_scale=loss_scale, loss_scale_steps=3),
        KINDS[kind]([twin]),
    )
    for step in range(8):
        manager.zero_grad()
        plain.zero_grad()
        manager.backward(((p - step) ** 2).sum())
        ((twin - step) ** 2).sum().backward()
        manager.step()
        plain.step()
    assert torch.equal(p, twin)  # powers of two are exact


@settings(max_examples=60)
@given(
    overflows=st.lists(st.booleans(), max_size=30),
    steps=st.integers(1, 4),
    minimum=st.sampled_from([0.25, 1.0, 100.0]),
    maximum=st.sampled_from([1000.0, 5000.0, math.inf]),
    start=st.sampled_from([100.0, 1000.0]),
    factor=st.sampled_from([2.0, 3.0]),
)
def test_scale_follows_overflow_within_its_limits(
    overflows: list[bool], steps: int, minimum: float, maximum: float, start: float, factor: float
) -> None:
    p = parameter()
    manager = managed(
        p,
        loss_scale=start,
        loss_scale_factor=factor,
        loss_scale_steps=steps,
        min_loss_scale=minimum,
        max_loss_scale=maximum,
    )
    scale, clean = start, 0
    for is_bad in overflows:
        p.grad = torch.full((3,), math.inf if is_bad else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            manager.step()
        if is_bad:
            scale, clean = max(scale / factor, minimum), 0
        else:
            clean += 1
            if clean >= steps and scale < maximum:
                scale, clean = min(scale * factor, maximum), 0
        assert manager.loss_scale == scale and manager.steps_since_last_scale == clean
        assert minimum <= manager.loss_scale <= maximum


def test_a_scale_that_was_set_beyond_a_limit_is_not_moved_to_it() -> None:
    below, above = LossScale(value=0.5, minimum=1.0), LossScale(value=8.0, maximum=4.0, steps=1)
    below.after_overflow()
    above.after_step()
    assert below.value == 0.5 and above.value == 8.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_scale", 0, "loss_scale must be a positive number"),
        ("loss_scale", math.nan, "loss_scale must be a positive number"),
        ("loss_scale_factor", 1, "loss_scale_factor must be greater than 1, it is 1"),
        ("loss_scale_steps", 0, "loss_scale_steps must be at least 1, it is 0"),
        ("min_loss_scale", 5000, "they are 5000 and 4096"),
        ("min_loss_scale", 0, "min_loss_scale must be positive"),
        ("max_loss_scale", 0.5, "they are 1 and 0.5"),
    ],
)
def test_impossible_settings_are_refused_and_change_nothing(
    name: str, value: float, message: str
) -> None:
    settings: dict[str, Any] = {"loss_scale": 8, "max_loss_scale": 4096}
    with pytest.raises(ValueError, match=message):
        OptimManager(**{**settings, name: value})
    manager = OptimManager(**settings)
    before = manager.state_dict()
    with pytest.raises(ValueError, match=message):
        setattr(manager, name, value)
    assert manager.state_dict() == before
    with pytest.raises(ValueError, match="non_finite must be 'skip', 'raise' or 'ignore'"):
        OptimManager(non_finite="stop")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["dynamic", True, "128"])
def test_a_scale_that_is_no_number_is_refused_with_what_is_expected(value: Any) -> None:
    said = r"loss_scale must be a number, not .*2\*\*20, or None .* \(dynamic loss scaling\)\."
    with pytest.raises(TypeError, match=said):
        OptimManager(loss_scale=value)
    manager = OptimManager(loss_scale=8)
    with pytest.raises(TypeError, match=said):
        manager.loss_scale = value
    with pytest.raises(TypeError, match=r"min_loss_scale must be a number, not None\.$"):
        OptimManager(loss_scale=8, min_loss_scale=None)  # type: ignore[arg-type]
    assert manager.loss_scale == 8


def test_the_settings_that_nobody_gives_are_bmtrains() -> None:
    assert LossScale(value=None) == LossScale(
        value=None, factor=2.0, steps=1024, minimum=1.0, maximum=math.inf, steps_since_last_scale=0
    )


@given(
    value=st.one_of(st.none(), st.floats(2.0**-10, 2.0**20)),
    clean=st.integers(0, 9),
    steps=st.integers(1, 9),
    factor=st.floats(1.5, 8),
)
def test_a_scale_is_what_its_state_says_and_a_state_without_one_changes_none(
    value: float | None, clean: int, steps: int, factor: float
) -> None:
    saved = LossScale(
        value=value, factor=factor, steps=steps, minimum=2.0**-20, steps_since_last_scale=clean
    )
    other = LossScale(value=64.0, factor=3.0, steps=5, steps_since_last_scale=4)
    state = saved.state_dict()
    assert (state["loss_scale"], state["loss_scale_enabled"]) == (
        (1, False) if value is None else (value, True)
    )
    without = LossScale(value=64.0, factor=3.0, steps=5, steps_since_last_scale=0)
    assert other.loaded(state) == (without if value is None else saved)
    # BMTrain's states have a scale and nothing else.
    assert other.loaded({"loss_scale": 8.0, "loss_scale_enabled": True}) == replace(
        without, value=8.0
    )
    assert other.loaded({"loss_scale": 8.0}) == without


@pytest.mark.parametrize("state", [{}, {"loss_scale": None}, {"loss_scale": "x"}])
def test_a_state_that_no_scale_can_have_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no loss scale that can be used"):
        LossScale(value=8.0).loaded({**state, "loss_scale_enabled": True})


# Overflow


@pytest.mark.parametrize(("kind", "dtype", "bad"), pairwise(KINDS, DTYPES, BAD))
def test_overflow_skips_everything_and_shrinks_the_scale(
    kind: str, dtype: torch.dtype, bad: float
) -> None:
    p, other = parameter(dtype=dtype), parameter(5.0)
    optimizer, second = KINDS[kind]([p]), AdamOptimizer([other])
    schedule = Linear(optimizer, 0.1, 0, 10)
    manager = OptimManager(loss_scale=8)
    manager.add_optimizer(second)
    manager.add_optimizer(optimizer, schedule)
    p.grad, other.grad = torch.tensor([1.0, bad, 1.0], dtype=dtype), torch.ones(1)
    manager.step()
    assert (
        torch.equal(p.detach(), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)) and other.item() == 5.0
    )
    assert not optimizer.state and not second.state
    assert p.grad is None and other.grad is None
    assert schedule.num_iter == 0 and manager.loss_scale == 4 and manager.skipped_steps == 1
    p.grad, other.grad = torch.ones(3, dtype=dtype), torch.ones(1)
    manager.step()
    assert schedule.num_iter == 1 and not torch.equal(
        p.detach(), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    )


def test_overflow_at_the_smallest_scale_is_reported() -> None:
    p = parameter()
    manager = managed(p, loss_scale=2, min_loss_scale=2)
    p.grad = torch.full((3,), math.nan)
    with pytest.warns(
        RuntimeWarning,
        match=r"infinite or NaN at the smallest loss scale \(2\): step skipped \(1 so far\)",
    ):
        manager.step()
    assert manager.loss_scale == 2


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_scaling_a_bad_gradient_is_reported_and_skipped(
    dtype: torch.dtype, bad: float
) -> None:
    p = parameter(dtype=dtype)
    manager = managed(p)
    p.grad = torch.tensor([1.0, 1.0, bad], dtype=dtype)
    with pytest.warns(
        RuntimeWarning, match=r"A gradient is infinite or NaN: step skipped \(1 so far\)"
    ):
        manager.step()
    assert p.grad is None and p[0] == 1.0 and manager.loss_scale == 1


def test_without_scaling_a_bad_gradient_is_raised_or_ignored_on_request() -> None:
    p = parameter()
    manager = managed(p, non_finite="raise")
    p.grad = torch.full((3,), math.nan)
    with pytest.raises(FloatingPointError, match="A gradient is infinite or NaN on some rank"):
        manager.step()
    assert p[0] == 1.0 and p.grad is not None
    manager = managed(p, non_finite="ignore")
    manager.step()
    assert p.isnan().all()


@pytest.mark.parametrize("kind", ["bmt", "fused"])
def test_flag_left_on_the_device_leads_to_the_same_training(deferred: None, kind: str) -> None:
    results = []
    for free in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bmt_optim.manager._is_on_host", lambda flag, free=free: free)
            p = parameter()
            optimizer = KINDS[kind]([p])
            schedule = Linear(optimizer, 0.1, 2, 30)
            manager = OptimManager(loss_scale=64.0, loss_scale_steps=3, min_loss_scale=16)
            manager.add_optimizer(optimizer, schedule)
            trace = []
            for step in range(15):
                manager.zero_grad()
                factor = math.inf if step in (2, 3, 9) else 1.0
                manager.backward(((p - step) ** 2).sum() * factor)
                manager.clip_grad_norm(optimizer.param_groups, 5.0)
                manager.step()
                trace.append(
                    (p.detach().clone(), manager.loss_scale, schedule.current_lr, schedule.num_iter)
                )
            state = optimizer.state_dict()["state"][0]
            results.append((trace, manager.skipped_steps, state))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
    assert results[0][1] == results[1][1] == 3
    assert all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(results[1][2][k]))
        for k, v in results[0][2].items()
    )


def test_flag_left_on_the_device_is_not_read_in_the_step(deferred: None) -> None:
    p = parameter()
    manager = managed(p, loss_scale=64.0)
    for bad in (False, True, False):
        p.grad = torch.full((3,), math.nan if bad else 1.0)
        manager.read_outcome()
        with no_host_reads():
            manager.clip_grad_norm([p], 1.0)
            manager.step()
        if bad:
            assert p.grad is not None and p.grad.eq(0).all()  # cleared on the device
    assert manager.skipped_steps == 1 and manager.loss_scale == 32


def test_flag_is_read_where_an_optimizer_or_a_scheduler_needs_the_host(deferred: None) -> None:
    for kind in ("unaware", "adamw"):
        p = parameter()
        manager = managed(p, kind, loss_scale=64.0)
        p.grad = torch.full((3,), math.nan)
        manager.step()
        assert manager._outcome is None and p.grad is None and p[0] == 1.0
    p = parameter()
    optimizer = AdamOptimizer([p])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    manager = OptimManager(loss_scale=64.0)
    manager.add_optimizer(optimizer, schedule)
    p.grad = torch.full((3,), math.nan)
    manager.step()
    assert schedule.last_epoch == 0
    p.grad = torch.ones(3)
    manager.step()
    assert schedule.last_epoch == 1


@on_ranks(2)
@cells("bad_rank", [0, 1])
@cells("dtype", [torch.float32, torch.float16])
@cells("loss_scale", [None, 8.0])
def test_overflow_on_one_rank_skips_on_all(
    bad_rank: int, dtype: torch.dtype, loss_scale: float | None
) -> None:
    shard = DistributedParameter(torch.arange(5).to(dtype))
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(AdamOptimizer([shard]))
    shard.grad = torch.full_like(shard, math.inf if runtime.rank() == bad_rank else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        manager.step()
    expected = 1 if loss_scale is None and runtime.rank() == 0 else 0
    assert len(caught) == expected, "rank 0 reports, and only without scaling"
    assert manager.skipped_steps == 1 and manager.loss_scale == (4.0 if loss_scale else 1)
    assert torch.equal(shard.gather().detach(), torch.arange(5).to(dtype)) and shard.grad is None


@on_ranks(2)
def test_a_raised_bad_gradient_is_raised_on_all_ranks() -> None:
    p = parameter()
    manager = managed(p, non_finite="raise")
    p.grad = torch.full((3,), math.nan if runtime.rank() else 1.0)
    with pytest.raises(FloatingPointError):
        manager.step()


@pytest.mark.gpu
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_on_a_gpu_no_step_synchronises(loss_scale: float | None) -> None:
    ours, theirs = (
        torch.nn.Parameter(torch.ones(1000, device="cuda", dtype=torch.bfloat16)) for _ in range(2)
    )
    one, two = AdamOptimizer([ours]), torch.optim.AdamW([theirs], fused=True)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(one, Linear(one, 0.1, 2, 30))
    manager.add_optimizer(two, Linear(two, 0.1, 2, 30))

    def iteration(factor: float) -> None:
        manager.zero_grad()
        manager.backward((ours * factor).sum() + theirs.sum())
        manager.clip_grad_norm([*one.param_groups, *two.param_groups], 1.0)
        manager.step()

    iteration(1.0)
    iteration(1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for factor in (1.0, math.inf, 1.0):
                iteration(factor)
            manager.read_outcome()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert manager.skipped_steps == 1 and one.state[ours]["step"] == 4
    assert manager.lr_schedulers[0].num_iter == manager.lr_schedulers[1].num_iter == 4
    assert ours.isfinite().all() and theirs.isfinite().all()
