"""Clipping by the norm of all gradients, compared with its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from managed import BAD, DTYPES, managed, no_host_reads, parameter

from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells
from pairwise import pairwise


def numbers(*, dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape in [(7,), (3, 4), (0,), (), (1,)]
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    params.append(torch.nn.Parameter(torch.zeros(5)))  # without gradient
    return params


def norm_of(params: list[torch.nn.Parameter], p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(
        torch.cat([q.grad.double().reshape(-1) for q in params if q.grad is not None]), p
    )


@pytest.mark.parametrize(
    ("dtype", "norm_type", "loss_scale"),
    pairwise(DTYPES, [1, 2, 3, 2.5, "inf", math.inf], [None, 256.0]),
)
def test_clipping_equals_its_definition(
    dtype: torch.dtype, norm_type: float | str, loss_scale: float | None
) -> None:
    params = numbers(dtype=dtype)
    manager = OptimManager(loss_scale=loss_scale)
    scale = loss_scale or 1.0
    for q in params:
        if q.grad is not None:
            q.grad *= scale
    before = [None if q.grad is None else q.grad.clone() for q in params]
    expected = norm_of(params, float(norm_type))
    with no_host_reads():
        norm = manager.clip_grad_norm(
            [{"params": params[:2]}, {"params": params[1:]}], 0.5, norm_type=norm_type
        )
    assert isinstance(norm, torch.Tensor) and norm.shape == ()
    torch.testing.assert_close(norm.double(), expected / scale, rtol=1e-5, atol=0)
    factor = 0.5 * scale / (expected + 1e-6)
    assert factor < 1
    for q, grad in zip(params, before, strict=True):
        if grad is not None:
            assert q.grad is not None
            tolerance = torch.finfo(dtype).eps
            torch.testing.assert_close(
                q.grad.double(), grad.double() * factor, rtol=max(tolerance, 1e-5), atol=1e-7
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_leaves_small_gradients_alone_in_every_bit(dtype: torch.dtype) -> None:
    params = numbers(dtype=dtype)
    before = [None if q.grad is None else q.grad.clone() for q in params]
    OptimManager().clip_grad_norm([{"params": params}], 1000.0)
    assert all(
        a is None or torch.equal(a, q.grad)
        for a, q in zip(before, params, strict=True)
        if q.grad is not None
    )


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
    layer = torch.nn.Linear(2, 2)
    for wrong, kind in (
        ([{"params": ["weight"]}], "str"),
        (layer, "Linear"),
        (torch.nn.Sequential(layer), "Linear"),
        (layer.parameters, "method"),
        (list(layer.named_parameters()), "tuple"),
        (manager.optimizers[0], "AdamOptimizer"),
    ):
        for take in (manager.clip_grad_norm, manager.unscaled_gradients):
            arguments: Any = (wrong, 1.0)[: 2 - (take == manager.unscaled_gradients)]
            said = r"such as model\.parameters\(\), or groups, .*, and not "
            with pytest.raises(TypeError, match=said + kind):
                take(*arguments)


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


@on_ranks(4)
@cells("norm_type", [1, 2, "inf"])
def test_norm_counts_every_element_once_with_empty_shards(norm_type: float | str) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in [(7,), (1,), (3, 3)]]
    expected = torch.linalg.vector_norm(
        torch.cat([g.reshape(-1) for g in grads]), float(norm_type)
    ).item()
    shards = [DistributedParameter(torch.zeros_like(g)) for g in grads[:2]]
    for shard, grad in zip(shards, grads, strict=False):
        shard.grad = shard.local_part(grad).clone()
    plain = torch.nn.Parameter(torch.zeros(3, 3))
    # The local gradients add up to this.
    plain.grad = grads[2].clone() if runtime.rank() == 1 else None
    norm = OptimManager().clip_grad_norm([*shards, plain], 0.5, norm_type=norm_type)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    clipped = [*(s.gather_like(s.grad) for s in shards if s.grad is not None), plain.grad]
    torch.testing.assert_close(clipped, [grad * (0.5 / (expected + 1e-6)) for grad in grads])
