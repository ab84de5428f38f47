"""``AdamOptimizer`` against ``torch.optim.Adam`` and against the formula in double precision."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_adam import bits, give_gradients, is_half, masters, parameters, train

from bmt_core.errors import CheckpointError, ConfigError
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, AdamW

HALVES = [torch.float16, torch.bfloat16]


class Formula:
    """The update in double precision, from API to numbers, one parameter at a time."""

    def __init__(
        self, params: list[torch.nn.Parameter], *, lr: float, wd: float, decoupled: bool
    ) -> None:
        self.p = [p.detach().double() for p in params]
        self.m = [torch.zeros_like(p) for p in self.p]
        self.v = [torch.zeros_like(p) for p in self.p]
        self.lr, self.wd, self.decoupled, self.t = lr, wd, decoupled, 0

    def step(self, grads: list[torch.Tensor]) -> None:
        self.t += 1
        for i, grad in enumerate(grads):
            g = grad.double() + (0.0 if self.decoupled else self.wd) * self.p[i]
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            update = (self.m[i] / (1 - 0.9**self.t)) / (
                (self.v[i] / (1 - 0.999**self.t)).sqrt() + 1e-8
            )
            decay = self.wd * self.p[i] if self.decoupled else 0.0
            self.p[i] = self.p[i] - self.lr * update - self.lr * decay


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    lr=st.floats(1e-5, 1.0),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.999)),
    weight_decay=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
    foreach=st.booleans(),
)
def test_float32_equals_torch_for_all_sizes_and_settings(
    sizes: list[int],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    seed: int,
    foreach: bool,
) -> None:
    torch.manual_seed(seed)
    ours = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine = AdamOptimizer(ours, lr=lr, betas=betas, weight_decay=weight_decay)
    torchs = torch.optim.Adam(
        theirs, lr=lr, betas=betas, weight_decay=weight_decay, foreach=foreach
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(mine.state[a]["exp_avg_sq"], torchs.state[b]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("decoupled", [None, True, False])
def test_half_parameters_follow_the_formula_and_are_the_master_rounded_to_nearest(
    dtype: torch.dtype, decoupled: bool | None
) -> None:
    params = parameters(dtype)
    optimizer = AdamOptimizer(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=decoupled)
    formula = Formula(params, lr=0.01, wd=0.1, decoupled=decoupled is not False)
    for step in range(30):
        give_gradients(params, step)
        formula.step([p.grad for p in params if p.grad is not None])
        optimizer.step()
    for p, expected in zip(params, formula.p, strict=True):
        state = optimizer.portable_state(p)
        assert (
            state["_param_fp32"].dtype
            == state["exp_avg"].dtype
            == state["exp_avg_sq"].dtype
            == torch.float32
        )
        torch.testing.assert_close(state["_param_fp32"].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(p.detach(), state["_param_fp32"].to(dtype))


def test_float16_moments_do_not_overflow_when_the_scale_grows() -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = AdamOptimizer([p], lr=0.01)
    for scale in (2.0**10, 2.0**15, 2.0**15):
        p.grad = torch.full((3,), 60000.0, dtype=torch.float16)
        optimizer.step(scale=scale)
    state = optimizer.state[p]
    assert state["exp_avg_sq"].dtype == torch.float32 and state["exp_avg_sq"].isfinite().all()
    p.grad = torch.full((3,), 60000.0, dtype=torch.float16)
    optimizer.step()  # 60000 squared is far beyond float16
    assert state["exp_avg_sq"].isfinite().all() and p.isfinite().all()
    assert state["exp_avg_sq"][0].item() == pytest.approx(0.001 * 60000.0**2, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hold_steps_moves_moments_and_not_parameters_for_exactly_that_many_steps(
    dtype: torch.dtype,
) -> None:
    held, free = parameters(dtype), parameters(dtype)
    optimizer, reference = AdamOptimizer(held, lr=0.1, hold_steps=3), AdamOptimizer(free, lr=0.1)
    start = [p.detach().clone() for p in held]
    for step in range(5):
        train([step], optimizer, reference)
        has_moved = any(not torch.equal(p, s) for p, s in zip(held, start, strict=True))
        assert has_moved == (step >= 3)
    for a, b in zip(held, free, strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], reference.state[b]["exp_avg"])
        assert optimizer.state[a]["step"] == 5


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamOptimizer([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None and loss.item() == 4.0
    assert p.item() == pytest.approx(1.9)


def test_loaded_state_does_not_share_memory_with_what_it_was_loaded_from() -> None:
    params = parameters()
    optimizer = AdamOptimizer(params)
    train([0], optimizer)
    other = AdamOptimizer(copy.deepcopy(params))
    saved = optimizer.state_dict()
    before = saved["state"][0]["exp_avg"].clone()
    other.load_state_dict(saved)
    give_gradients(other.param_groups[0]["params"], 1)
    other.step()
    assert torch.equal(saved["state"][0]["exp_avg"], before)


def test_state_of_other_shapes_is_refused_and_nothing_changes() -> None:
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(6))]
    optimizer = AdamOptimizer(params)
    train([0], optimizer)
    other_params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3))]
    other = AdamOptimizer(other_params, lr=0.5)
    with pytest.raises(
        CheckpointError,
        match=r"parameter 1 has exp_avg of shape \(6,\), and the parameter here has \(3,\)",
    ):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5 and not other.state
    with pytest.raises(
        CheckpointError,
        match=r"The state has groups of \[2\] parameters, and this optimizer of \[1\]",
    ):
        AdamOptimizer(other_params[:1]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"eps": -1e-9},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"hold_steps": -1},
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamOptimizer(parameters(), **options)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
@pytest.mark.parametrize("kind", [AdamOptimizer, AdamW, AdamOffloadOptimizer])
def test_options_of_torch_that_change_steps_are_refused_in_groups(option: str, kind: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    for value in (False, True):
        optimizer = kind([{"params": [p], option: value}], lr=0.1)
        p.grad = torch.ones(2)
        with pytest.raises(ConfigError, match=f"{option}=True") if value else nullcontext():
            optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.9), rtol=0, atol=0.01)


def test_betas_may_be_tensors() -> None:
    results = []
    for number in (float, torch.tensor):
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = AdamOptimizer([p], lr=0.1, betas=(number(0.8), number(0.9)))
        for gradient in (1.0, -2.0):
            p.grad = torch.full((2,), gradient)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="dense gradients"):
        AdamOptimizer(embedding.parameters()).step()


def test_torch_grad_scaler_drives_it() -> None:
    p, twin = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer, reference = AdamOptimizer([p], lr=0.1), AdamOptimizer([twin], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        factor = math.inf if step == 1 else 1.0 + step
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            (twin * factor).sum().backward()
            reference.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    assert torch.equal(p, twin)


# On a GPU torch's fused kernel takes the step


@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("is_skippable", [False, True])
def test_on_a_gpu_float32_equals_fused_torch_in_every_bit(
    weight_decay: float, is_skippable: bool
) -> None:
    ours, theirs = ([torch.nn.Parameter(p.detach().cuda()) for p in parameters()] for _ in range(2))
    mine = AdamOptimizer(ours, lr=0.01, weight_decay=weight_decay)
    torchs = torch.optim.Adam(theirs, lr=0.01, weight_decay=weight_decay, fused=True)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).cuda()
            b.grad = a.grad.clone()
        if is_skippable:
            mine.found_inf = torch.zeros((), device="cuda")
        mine.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("compact_master", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_on_a_gpu_half_parameters_follow_the_formula(compact_master: bool, decoupled: bool) -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(torch.bfloat16)]
    optimizer = AdamOptimizer(
        params,
        lr=0.01,
        weight_decay=0.1,
        decoupled_weight_decay=decoupled,
        compact_master=compact_master,
    )
    on_host = [torch.nn.Parameter(p.detach().cpu()) for p in params]
    formula = Formula(on_host, lr=0.01, wd=0.1, decoupled=decoupled)
    for step in range(30):
        give_gradients(on_host, step)
        grads = [p.grad for p in on_host if p.grad is not None]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.cuda() * 8
        formula.step(grads)
        optimizer.step(scale=8)
    for p, master, expected in zip(params, masters(optimizer), formula.p, strict=True):
        torch.testing.assert_close(master.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        compared = ~is_half(master)
        assert torch.equal(p.detach()[compared], master.bfloat16()[compared])


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_forward", [False, True])
def test_on_a_gpu_a_compact_master_is_the_same_master_and_nothing_waits(
    overlap_forward: bool,
) -> None:
    sizes = [1, 1001, (1 << 24) + 3]
    start = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)).cuda().bfloat16()
        for size in sizes
    ]
    params, twins = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    compact, whole = (
        AdamOptimizer(
            ps, lr=0.01, weight_decay=0.1, compact_master=setting, overlap_forward=overlap_forward
        )
        for ps, setting in ((params, True), (twins, False))
    )
    flag, scale = torch.zeros((), device="cuda"), torch.full((), 8.0, device="cuda")
    for optimizer in (compact, whole):
        optimizer.found_inf, optimizer.grad_scale = flag, scale
    for step in range(12):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p) * 8
            p.grad[0] = math.inf if step in (5, 11) else 1.0
            twin.grad = p.grad
        flag.fill_(step == 5)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compact.step()
            whole.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p, twin, a, b in zip(params, twins, masters(compact), masters(whole), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
            compared = ~is_half(a) & ~a.isnan()
            assert torch.equal(bits(p)[compared], bits(twin)[compared])
            assert p[1:].isfinite().all() and p.isnan().any() == (step == 11)
