"""``AdamOffloadOptimizer`` on GPUs: what it computes, that nothing waits, and that delays
change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_training import Layer, Training, both
from torch import nn

from bmt_optim import AdamOffloadOptimizer, OptimManager
from bmt_testing import gpu_ranks, run_ranks
from bmt_zero import Block, TransformerBlockList


def gpu_results(dtype: torch.dtype) -> list[Any]:
    return both(Chunked, dtype)


class Chunked(AdamOffloadOptimizer):
    """In small chunks, so that there are several."""

    chunk = 37


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpus_training_equals_that_of_adam_to_rounding(
    world_size: int, dtype: torch.dtype
) -> None:
    for results in run_ranks(gpu_results, world_size, dtype, init={"device": "cuda"}):
        for settings, expected, found in results:
            for a, b in zip(expected, found, strict=True):
                if dtype == torch.float32:
                    # Where a gradient is next to nothing, Adam's first steps are signs of
                    # its rounding.
                    torch.testing.assert_close(
                        a, b, rtol=1e-3, atol=1e-4, msg=lambda text, s=settings: f"{s}: {text}"
                    )
                else:
                    torch.testing.assert_close(a, b, rtol=0.05, atol=0.03)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16)
        self.down = nn.Linear(4096, 1024, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def train_wide(overlap_forward: bool, max_norm: float | None) -> tuple[int, int, bool, list[float]]:
    """Return bytes of parameters, bytes that steps took beside what was there, whether states are
    page-locked, and losses.
    """
    torch.manual_seed(0)
    model = TransformerBlockList([Block(Wide(), zero_level=3) for _ in range(6)])
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-3, overlap_forward=overlap_forward)
    manager = OptimManager(loss_scale=1024.0)
    manager.add_optimizer(optimizer)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    taken, losses = 0, []

    def step() -> None:
        nonlocal taken
        manager.zero_grad()
        loss = model(x).float().square().mean()
        losses.append(loss.detach())
        manager.backward(loss)
        if max_norm is not None:
            manager.clip_grad_norm(optimizer.param_groups, max_norm)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        manager.step()
        taken = max(taken, torch.cuda.max_memory_allocated() - before)

    for _ in range(3):
        step()
    optimizer.wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    optimizer.wait()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    is_locked = all(state["exp_avg"].is_pinned() for state in optimizer.state.values())
    return size, taken, is_locked, [loss.item() for loss in losses]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_on_a_gpu_nothing_is_synchronised_and_steps_take_no_memory(
    overlap_forward: bool, max_norm: float | None
) -> None:
    for size, taken, is_locked, losses in run_ranks(
        train_wide, 1, overlap_forward, max_norm, init={"device": "cuda"}
    ):
        assert is_locked and taken < size / 20
        assert losses[-1] < losses[0]


def delayed_training(cycles: int, overlap_forward: bool) -> list[torch.Tensor]:
    training = Training(Chunked, level=3, max_norm=1.0, overlap_forward=overlap_forward)
    for layer in training.model.modules():
        if isinstance(layer, Layer):
            layer.register_forward_pre_hook(lambda module, arguments: torch.cuda._sleep(cycles))
            layer.register_full_backward_hook(
                lambda module, before, after: torch.cuda._sleep(cycles)
            )
    for number in range(5):
        training.step(number)
    return training.whole()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_forward", [False, True])
def test_on_a_gpu_delays_change_nothing(overlap_forward: bool) -> None:
    size = min(gpu_ranks(), 2)
    expected = run_ranks(delayed_training, size, 0, overlap_forward, init={"device": "cuda"})
    for cycles in (1_000_000, 5_000_000):
        found = run_ranks(delayed_training, size, cycles, overlap_forward, init={"device": "cuda"})
        assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))
