"""``OptimManager`` against plain torch: scaling, overflow, clipping, several optimizers, and what ranks agree on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from managed import KINDS, Unaware, managed, parameter
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.errors import ConfigError
from bmt_optim import AdamOptimizer, OptimManager, available, create
from bmt_optim.lr_scheduler import Linear

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BAD = [math.inf, -math.inf, math.nan]


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail when a tensor's value is read on the host: what would make the host wait for a GPU."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


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
    assert [state[key] for key in ("loss_scale_factor", "loss_scale_steps", "min_loss_scale", "max_loss_scale")] == [
        *(4, 3, 2000, 5000)
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_scale_factor", 1, "loss_scale_factor must be greater than 1, it is 1"),
        ("loss_scale_steps", 0, "loss_scale_steps must be at least 1, it is 0"),
        ("min_loss_scale", 5000, "they are 5000 and 4096"),
        ("max_loss_scale", 0.5, "they are 1 and 0.5"),
    ],
)
def test_settings_of_the_scale_that_no_scale_can_have_are_refused_and_change_nothing(
    name: str, value: float, message: str
) -> None:
    manager = OptimManager(loss_scale=8, max_loss_scale=4096)
    before = manager.state_dict()
    with pytest.raises(ValueError, match=message):
        setattr(manager, name, value)
    assert manager.state_dict() == before


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
    manager, plain = managed(p, kind, loss_scale=loss_scale, loss_scale_steps=3), KINDS[kind]([twin])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": 0}, "loss_scale must be a positive number"),
        ({"loss_scale": math.nan}, "loss_scale must be a positive number"),
        ({"loss_scale": 8, "loss_scale_factor": 1}, "loss_scale_factor must be greater than 1"),
        ({"loss_scale": 8, "loss_scale_steps": 0}, "loss_scale_steps must be at least 1"),
        ({"loss_scale": 8, "min_loss_scale": 16, "max_loss_scale": 8}, "min_loss_scale"),
        ({"non_finite": "stop"}, "non_finite must be 'skip', 'raise' or 'ignore'"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimManager(**options)


# Overflow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_overflow_skips_everything_and_shrinks_the_scale(kind: str, dtype: torch.dtype, bad: float) -> None:
    p, other = parameter(dtype=dtype), parameter(5.0)
    optimizer, second = KINDS[kind]([p]), AdamOptimizer([other])
    schedule = Linear(optimizer, 0.1, 0, 10)
    manager = OptimManager(loss_scale=8)
    manager.add_optimizer(second)
    manager.add_optimizer(optimizer, schedule)
    p.grad, other.grad = torch.tensor([1.0, bad, 1.0], dtype=dtype), torch.ones(1)
    manager.step()
    assert torch.equal(p.detach(), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)) and other.item() == 5.0
    assert not optimizer.state and not second.state
    assert p.grad is None and other.grad is None
    assert schedule.num_iter == 0 and manager.loss_scale == 4 and manager.skipped_steps == 1
    p.grad, other.grad = torch.ones(3, dtype=dtype), torch.ones(1)
    manager.step()
    assert schedule.num_iter == 1 and not torch.equal(p.detach(), torch.tensor([1.0, 2.0, 3.0], dtype=dtype))


def test_overflow_at_the_smallest_scale_is_reported() -> None:
    p = parameter()
    manager = managed(p, loss_scale=2, min_loss_scale=2)
    p.grad = torch.full((3,), math.nan)
    with pytest.warns(
        RuntimeWarning, match=r"infinite or NaN at the smallest loss scale \(2\): step skipped \(1 so far\)"
    ):
        manager.step()
    assert manager.loss_scale == 2


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_scaling_a_bad_gradient_is_reported_and_skipped(dtype: torch.dtype, bad: float) -> None:
    p = parameter(dtype=dtype)
    manager = managed(p)
    p.grad = torch.tensor([1.0, 1.0, bad], dtype=dtype)
    with pytest.warns(RuntimeWarning, match=r"A gradient is infinite or NaN: step skipped \(1 so far\)"):
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
                trace.append((p.detach().clone(), manager.loss_scale, schedule.current_lr, schedule.num_iter))
            state = optimizer.state_dict()["state"][0]
            results.append((trace, manager.skipped_steps, state))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
    assert results[0][1] == results[1][1] == 3
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(results[1][2][k])) for k, v in results[0][2].items())


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


@pytest.mark.gpu
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_on_a_gpu_no_step_synchronises(loss_scale: float | None) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(1000, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
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


# Clipping


def numbers(*, dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7,), (3, 4), (0,), (), (1,)]]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    params.append(torch.nn.Parameter(torch.zeros(5)))  # without gradient
    return params


def norm_of(params: list[torch.nn.Parameter], p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([q.grad.double().reshape(-1) for q in params if q.grad is not None]), p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [1, 2, 3, 2.5, "inf", math.inf])
@pytest.mark.parametrize("loss_scale", [None, 256.0])
def test_clipping_equals_its_definition(dtype: torch.dtype, norm_type: float | str, loss_scale: float | None) -> None:
    params = numbers(dtype=dtype)
    manager = OptimManager(loss_scale=loss_scale)
    scale = loss_scale or 1.0
    for q in params:
        if q.grad is not None:
            q.grad *= scale
    before = [None if q.grad is None else q.grad.clone() for q in params]
    expected = norm_of(params, float(norm_type))
    with no_host_reads():
        norm = manager.clip_grad_norm([{"params": params[:2]}, {"params": params[1:]}], 0.5, norm_type=norm_type)
    assert isinstance(norm, torch.Tensor) and norm.shape == ()
    torch.testing.assert_close(norm.double(), expected / scale, rtol=1e-5, atol=0)
    factor = 0.5 * scale / (expected + 1e-6)
    assert factor < 1
    for q, grad in zip(params, before, strict=True):
        if grad is not None:
            assert q.grad is not None
            tolerance = torch.finfo(dtype).eps
            torch.testing.assert_close(q.grad.double(), grad.double() * factor, rtol=max(tolerance, 1e-5), atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_leaves_small_gradients_alone_in_every_bit(dtype: torch.dtype) -> None:
    params = numbers(dtype=dtype)
    before = [None if q.grad is None else q.grad.clone() for q in params]
    OptimManager().clip_grad_norm([{"params": params}], 1000.0)
    assert all(a is None or torch.equal(a, q.grad) for a, q in zip(before, params, strict=True) if q.grad is not None)


def test_clipping_is_formed_in_float32() -> None:
    p = torch.nn.Parameter(torch.zeros(600, dtype=torch.bfloat16))
    p.grad = torch.ones(600, dtype=torch.bfloat16)
    assert OptimManager().clip_grad_norm([p], 1e9, norm_type=1) == 600
    p = torch.nn.Parameter(torch.zeros(100, dtype=torch.float16))
    p.grad = torch.full((100,), 60000.0, dtype=torch.float16)
    assert OptimManager().clip_grad_norm([p], 1e9).item() == pytest.approx(600000)


@pytest.mark.parametrize("norm_type", [2, "inf"])
@pytest.mark.parametrize("bad", BAD)
def test_a_norm_that_is_not_finite_is_found_by_step(norm_type: float | str, bad: float) -> None:
    p, q = parameter(), parameter()
    manager = OptimManager(loss_scale=8)
    manager.add_optimizer(AdamOptimizer([p, q]))
    p.grad, q.grad = torch.ones(3), torch.tensor([bad, 1.0, 1.0])
    assert not manager.clip_grad_norm([p, q], 1.0, norm_type).isfinite()
    manager.step()
    assert manager.skipped_steps == 1 and p[0] == 1.0


def test_finite_gradients_whose_squares_overflow_do_not_pass_for_a_step() -> None:
    p = parameter()
    manager = managed(p, loss_scale=8)
    p.grad = torch.full((3,), 1e30)
    manager.clip_grad_norm([p], 1.0)
    manager.step()
    assert manager.skipped_steps == 1 and p[0] == 1.0


def test_clipping_takes_one_group_and_says_what_it_cannot_take() -> None:
    p = parameter()
    manager = managed(p)
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    norm = manager.clip_grad_norm(manager.optimizers[0].param_groups[0], 1.0)
    assert norm == 5.0 and p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(TypeError, match="a group of an optimizer, or several of these; it has a str"):
        manager.clip_grad_norm([{"params": ["weight"]}], 1.0)


def test_clipping_nothing_and_impossible_norms() -> None:
    manager = OptimManager()
    assert manager.clip_grad_norm([], 1.0) == 0
    assert manager.clip_grad_norm([{"params": [parameter()]}], 1.0, "inf") == 0
    for norm_type in (0, -1, math.nan):
        with pytest.raises(ValueError, match="norm_type must be positive or 'inf'"):
            manager.clip_grad_norm([], 1.0, norm_type)
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must not be negative, it is"):
            manager.clip_grad_norm([], max_norm)


# Several optimizers


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
    with pytest.warns(UserWarning, match=rf"^{type(scheduler).__name__} has been stepped .* by the program") as caught:
        step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
        step()


def test_a_scheduler_that_needs_a_metric_is_refused_before_any_step() -> None:
    optimizer, manager = AdamOptimizer([parameter()]), OptimManager()
    with pytest.raises(ConfigError, match=r"call scheduler\.step\(metrics\) yourself after manager\.step\(\)"):
        manager.add_optimizer(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not manager.optimizers
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))


def test_optimizers_by_name() -> None:
    assert "adam" in available()
    optimizer = create("adam", [parameter()], lr=0.5)
    assert isinstance(optimizer, AdamOptimizer) and optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(Exception, match=r"No optimizer is named 'adan'\. Did you mean 'adam'"):
        create("adan", [parameter()])
