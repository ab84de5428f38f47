"""``OptimManager`` against plain torch: scaling, overflow, clipping, several optimizers, and what ranks agree on."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core import runtime
from bmt_core.parameter import DistributedParameter
from bmt_core.topology import Topology
from bmt_optim import AdamOptimizer, OptimManager, available, create
from bmt_optim.lr_scheduler import Linear

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BAD = [math.inf, -math.inf, math.nan]


class Unaware(torch.optim.Optimizer):
    """An optimizer as anybody writes one: no scale, no flags."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bmt": lambda params: AdamOptimizer(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "unaware": Unaware,
}


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
    monkeypatch.setattr("bmt_optim.optim_manager._is_free_to_read", lambda flag: False)


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0, 2.0, 3.0), dtype=dtype))


def managed(p: torch.nn.Parameter, kind: str = "bmt", **options: Any) -> OptimManager:
    manager = OptimManager(**options)
    manager.add_optimizer(KINDS[kind]([p]))
    return manager


# Scaling


def test_loss_is_multiplied_by_loss_scale_over_grad_scale() -> None:
    loss = torch.tensor(3.0)
    assert OptimManager().scale_loss(loss) == 3.0
    assert OptimManager(loss_scale=1024).scale_loss(loss) == 3072.0
    assert OptimManager(loss_scale=1024, grad_scale=4).scale_loss(loss) == 768.0
    manager = OptimManager()
    assert (manager.loss_scale, manager.loss_scale_enabled, manager.grad_scale) == (1, False, 1)
    assert OptimManager(loss_scale=8).loss_scale_enabled


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


@settings(max_examples=60, deadline=None)
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
            patch.setattr("bmt_optim.optim_manager._is_free_to_read", lambda flag, free=free: free)
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
        manager.settle()
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
            manager.settle()
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


def test_clipping_nothing_and_impossible_norms() -> None:
    manager = OptimManager()
    assert manager.clip_grad_norm([], 1.0) == 0
    assert manager.clip_grad_norm([{"params": [parameter()]}], 1.0, "inf") == 0
    for norm_type in (0, -1, math.nan):
        with pytest.raises(ValueError, match="norm_type must be positive or 'inf'"):
            manager.clip_grad_norm([], 1.0, norm_type)


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


def test_optimizers_by_name() -> None:
    assert "adam" in available()
    optimizer = create("adam", [parameter()], lr=0.5)
    assert isinstance(optimizer, AdamOptimizer) and optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(Exception, match=r"No optimizer is named 'adan'\. Did you mean 'adam'"):
        create("adan", [parameter()])


# Ranks


class Model(torch.nn.Module):
    """A small network; ``distribute`` names the parameters that are sharded, the others stay ordinary."""

    def __init__(self, dtype: torch.dtype, distribute: tuple[str, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in [("first", (5, 3)), ("second", (1, 5)), ("bias", (5,)), ("unused", (4,)), ("rare", (3,))]:
            value = torch.randn(shape, generator=generator).to(dtype)
            made = DistributedParameter(value) if name in distribute else torch.nn.Parameter(value)
            self.register_parameter(name, made)

    def whole(self, name: str) -> torch.Tensor:
        p = getattr(self, name)
        return p.gather() if isinstance(p, DistributedParameter) else p

    def loss(self, x: torch.Tensor, *, uses_rare: bool) -> torch.Tensor:
        if uses_rare:
            x = x * self.whole("rare")
        h = torch.tanh(x @ self.whole("first").t() + self.whole("bias"))
        return (h @ self.whole("second").t()).float().pow(2).mean()


def batches(dtype: torch.dtype) -> torch.Tensor:
    """Data of 5 steps: 2 micro-batches of 4 rows each."""
    return torch.randn(5, 2, 4, 3, generator=torch.Generator().manual_seed(5)).to(dtype)


def expected_training(dtype: torch.dtype, max_norm: float) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    """One process in plain torch. ``rare`` is used for the first row of a batch only, and not at all in the third step."""
    model = Model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    has_rare = []
    for step, micro_batches in enumerate(batches(dtype)):
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            for row, x in enumerate(micro_batch):
                (model.loss(x[None], uses_rare=row == 0 and step != 2) / 8).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
        norms.append(norm.item())
        has_rare.append(model.rare.grad is not None)
        for g in grads:
            g *= min(1.0, max_norm / (norm.item() + 1e-6))
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms, has_rare


def ranks_training(
    distribute: tuple[str, ...], max_norm: float, loss_scale: float | None
) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    model = Model(torch.float64, distribute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer)
    size, rank = runtime.world_size(), runtime.rank()
    rows = 4 // size
    norms = []
    has_rare = []
    for step, micro_batches in enumerate(batches(torch.float64)):
        manager.zero_grad()
        for micro_batch in micro_batches:
            for row in range(rank * rows, (rank + 1) * rows):
                # A sharded parameter is gathered by all ranks or none, so here the mask says where it counts.
                loss = _masked_loss(model, micro_batch[row][None], row == 0 and step != 2, distribute)
                manager.backward(loss / 2 / rows)
        norms.append(manager.clip_grad_norm(optimizer.param_groups, max_norm).item())
        has_rare.append(model.rare.grad is not None)
        manager.step()
    whole = [model.whole(name).detach() for name, _ in model.named_parameters()]
    return whole, norms, has_rare


def _masked_loss(model: Model, x: torch.Tensor, uses_rare: bool, distribute: tuple[str, ...]) -> torch.Tensor:
    if "rare" not in distribute:
        return model.loss(x, uses_rare=uses_rare)
    rare = model.whole("rare")
    return model.loss(torch.where(torch.tensor(uses_rare), x * rare, x), uses_rare=False)


NAMES = ("first", "second", "bias", "rare")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_plain_parameters_are_summed_over_ranks_exactly_once(
    run_ranks: Any, world_size: int, loss_scale: float | None, max_norm: float
) -> None:
    params, norms, has_rare = expected_training(torch.float64, max_norm)
    results = run_ranks(ranks_training, world_size, (), max_norm, loss_scale)
    for found, found_norms, found_rare in results:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert found_rare == has_rare == [True, True, False, True, True]  # None on all ranks, or on none
        for a, b in zip(found, params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(found, results[0][0], strict=True):
            assert torch.equal(a, b), "ranks drifted apart"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("distribute", [("first", "second", "bias"), ("first", "bias")])
@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_sharded_and_plain_parameters_together_equal_one_process(
    run_ranks: Any, world_size: int, distribute: tuple[str, ...], max_norm: float
) -> None:
    params, norms, _ = expected_training(torch.float64, max_norm)
    for found, found_norms, _ in run_ranks(ranks_training, world_size, distribute, max_norm, 64.0):
        assert found_norms == pytest.approx(norms, rel=1e-5)  # replicas are counted once
        for a, b in zip(found, params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_overflow_on_one_rank_skips_on_all(
    run_ranks: Any, bad_rank: int, dtype: torch.dtype, loss_scale: float | None
) -> None:
    for skipped, value, scale, is_cleared, num_warnings in run_ranks(_overflow, 2, bad_rank, dtype, loss_scale):
        assert skipped == 1 and torch.equal(value, torch.arange(5).to(dtype)) and is_cleared
        assert scale == (4.0 if loss_scale else 1)
        assert num_warnings <= 1


def _overflow(
    bad_rank: int, dtype: torch.dtype, loss_scale: float | None
) -> tuple[int, torch.Tensor, float, bool, int]:
    shard = DistributedParameter(torch.arange(5).to(dtype))
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(AdamOptimizer([shard]))
    shard.grad = torch.full_like(shard, math.inf if runtime.rank() == bad_rank else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        manager.step()
    expected = 1 if loss_scale is None and runtime.rank() == 0 else 0
    assert len(caught) == expected, "rank 0 reports, and only without scaling"
    return manager.skipped_steps, shard.gather().detach(), manager.loss_scale, shard.grad is None, len(caught)


def test_a_raised_bad_gradient_is_raised_on_all_ranks(run_ranks: Any) -> None:
    assert run_ranks(_raises, 2) == ["FloatingPointError"] * 2


def _raises() -> str:
    p = parameter()
    manager = managed(p, non_finite="raise")
    p.grad = torch.full((3,), math.nan if runtime.rank() else 1.0)
    try:
        manager.step()
    except FloatingPointError as error:
        return type(error).__name__
    return "no error"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_of_plain_parameters_are_summed_in_float32(run_ranks: Any, dtype: torch.dtype) -> None:
    for grad in run_ranks(_half_sum, 4, dtype):
        # Rank by rank in half precision this would be 256 + 1 + 1 + 1 = 256 (bfloat16).
        assert torch.equal(grad, torch.full((3,), 259.0).to(dtype))


def _half_sum(dtype: torch.dtype) -> torch.Tensor:
    p = parameter(dtype=dtype)
    manager = managed(p)
    p.grad = torch.full((3,), 1.0 if runtime.rank() else 256.0, dtype=dtype)
    manager.clip_grad_norm([p], 1e9)
    return p.grad


def test_gradients_are_local_again_after_they_were_cleared_in_any_way(run_ranks: Any) -> None:
    assert run_ranks(_clear_in_any_way, 2) == [[3.0, 3.0, 3.0, 3.0, 3.0]] * 2


def _clear_in_any_way() -> list[float]:
    p = parameter(0.0)
    manager = managed(p, "momentum")
    found = []

    def backward() -> None:
        (p * (1.0 + runtime.rank())).sum().backward()

    backward()
    manager.clip_grad_norm([p], 1e9)
    manager.clip_grad_norm([p], 1e9)
    found.append(p.grad.item())  # summed once, not twice
    manager.step()
    for clear in (manager.zero_grad, manager.optimizers[0].zero_grad, lambda: setattr(p, "grad", None)):
        clear()
        backward()
        manager.clip_grad_norm([p], 1e9)
        found.append(p.grad.item())
    # The user looks at the norm, clears and goes on without a step.
    manager.optimizers[0].zero_grad()
    backward()
    manager.clip_grad_norm([p], 1e9)
    found.append(p.grad.item())
    return found


def test_a_gradient_replaced_on_one_rank_only_is_an_error_on_all(run_ranks: Any) -> None:
    assert run_ranks(_replace_on_one_rank, 2) == ["replaced between clip_grad_norm() and step()"] * 2


def _replace_on_one_rank() -> str:
    p = parameter()
    manager = managed(p)
    p.grad = torch.ones(3)
    manager.clip_grad_norm([p], 1.0)
    if runtime.rank() == 0:
        p.grad = torch.ones(3)
    try:
        manager.step()
    except RuntimeError as error:
        text = "replaced between clip_grad_norm() and step()"
        return text if text in str(error) else str(error)
    return "no error"


def test_sums_can_be_left_to_the_program(run_ranks: Any) -> None:
    assert run_ranks(_own_sums, 2) == [1.0, 2.0]


def _own_sums() -> float:
    p = parameter(0.0)
    manager = managed(p, sum_plain_gradients=False)
    p.grad = torch.tensor([1.0 + runtime.rank()])
    manager.step()
    assert p.grad is not None
    return p.grad.item()


def test_grad_scale_is_the_number_of_ranks_with_different_data(run_ranks: Any) -> None:
    assert run_ranks(_grad_scales, 4) == [(4, 2, 7)] * 4


def _grad_scales() -> tuple[float, float, float]:
    manager = OptimManager()
    data_parallel = manager.grad_scale
    run = runtime.current()
    run.topology = Topology({"pp": 1, "dp": 2, "tp": 2}, run.rank, run.backend)
    return data_parallel, manager.grad_scale, OptimManager(grad_scale=7).grad_scale


@pytest.mark.parametrize("norm_type", [1, 2, "inf"])
def test_norm_counts_every_element_once_with_empty_shards(run_ranks: Any, norm_type: float | str) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in [(7,), (1,), (3, 3)]]
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]), float(norm_type)).item()
    for norm, wholes in run_ranks(_norm, 4, grads, norm_type):
        assert norm == pytest.approx(expected, rel=1e-5)
        for whole, grad in zip(wholes, grads, strict=True):
            torch.testing.assert_close(whole, grad * (0.5 / (expected + 1e-6)))


def _norm(grads: list[torch.Tensor], norm_type: float | str) -> tuple[float, list[torch.Tensor]]:
    shards = [DistributedParameter(torch.zeros_like(g)) for g in grads[:2]]
    for shard, grad in zip(shards, grads, strict=False):
        shard.grad = shard.local_part(grad).clone()
    plain = torch.nn.Parameter(torch.zeros(3, 3))
    plain.grad = copy.deepcopy(grads[2]) if runtime.rank() == 1 else None  # the local gradients add up to this
    manager = OptimManager()
    norm = manager.clip_grad_norm([*shards, plain], 0.5, norm_type=norm_type).item()
    assert plain.grad is not None
    return norm, [*(s.gather_like(s.grad) for s in shards if s.grad is not None), plain.grad]
