"""``AdamOffloadOptimizer`` on GPUs: what it computes, that nothing waits, and that delays
change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_training import Layer, Training, both
from torch import nn

from bmt_core.errors import ConfigError
from bmt_optim import AdamOffloadOptimizer, OptimManager
from bmt_optim.offload.placement import DeviceRoom
from bmt_testing import gpu_ranks, run_ranks
from bmt_zero import Block, TransformerBlockList


class Chunked(AdamOffloadOptimizer):
    """In small chunks, so that there are several."""

    chunk = 37


class Split(Chunked):
    """Keeps the states of the first parameters on the device."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, device_memory=3000, **options)


class Restless(Chunked):
    """Has another budget in each step."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        steps = [state["step"] for state in self.state.values()]
        self.device_memory = [0, 3000, "auto", 1000][max(steps, default=0) % 4]
        return super().step(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Chunked, Split, Restless])
def test_on_gpus_training_equals_that_of_adam_to_rounding(
    world_size: int, dtype: torch.dtype, kind: Any
) -> None:
    for results in run_ranks(both, world_size, kind, dtype, init={"device": "cuda"}):
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


def train_wide(
    overlap_forward: bool, max_norm: float | None, device_memory: int
) -> tuple[int, int, list[bool], list[float]]:
    """Return bytes of parameters, bytes that later steps took beside what was there, for each state
    whether it is page-locked on the host (else it is on the device), and losses.
    """
    torch.manual_seed(0)
    model = TransformerBlockList([Block(Wide(), zero_level=3) for _ in range(6)])
    optimizer = AdamOffloadOptimizer(
        model.parameters(), lr=1e-3, overlap_forward=overlap_forward, device_memory=device_memory
    )
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
    taken = 0  # the first step has made the states
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
    means = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(mean.is_pinned() or mean.is_cuda for mean in means)
    return size, taken, [not mean.is_cuda for mean in means], [loss.item() for loss in losses]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("device_memory", "blocks"), [(0, 0), (350 << 20, 4)])
def test_on_a_gpu_nothing_is_synchronised_and_steps_take_no_memory(
    overlap_forward: bool, max_norm: float | None, device_memory: int, blocks: int
) -> None:
    for size, taken, is_on_host, losses in run_ranks(
        train_wide, 1, overlap_forward, max_norm, device_memory, init={"device": "cuda"}
    ):
        assert is_on_host == [False] * 4 * blocks + [True] * 4 * (6 - blocks)
        assert taken < size / 20
        assert losses[-1] < losses[0]


def delayed_training(cycles: int, overlap_forward: bool, device_memory: int) -> list[torch.Tensor]:
    training = Training(
        Chunked, level=3, max_norm=1.0, overlap_forward=overlap_forward, device_memory=device_memory
    )
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
@pytest.mark.parametrize("device_memory", [0, 3000])
def test_on_a_gpu_delays_change_nothing(overlap_forward: bool, device_memory: int) -> None:
    size = min(gpu_ranks(), 2)
    settings = (overlap_forward, device_memory)
    expected = run_ranks(delayed_training, size, 0, *settings, init={"device": "cuda"})
    for cycles in (1_000_000, 5_000_000):
        found = run_ranks(delayed_training, size, cycles, *settings, init={"device": "cuda"})
        assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))


class Tight(AdamOffloadOptimizer):
    """On a GPU of which others have taken all but 1 MiB."""

    def _device_room(self) -> DeviceRoom:
        return TightRoom()


class TightRoom(DeviceRoom):
    def _measured(self, device: torch.device) -> int:
        free = super()._measured(device)
        total = torch.cuda.get_device_properties(device).total_memory
        assert 1 << 20 < free < total
        return 1 << 20


def refused_memory() -> str:
    p = torch.nn.Parameter(torch.ones(1 << 20, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = Tight([p], device_memory=1 << 40)
    try:
        optimizer.step()
    except ConfigError as error:
        return f"{len(optimizer.state)} states, {error}"
    return "no error"


@pytest.mark.gpu
def test_on_a_gpu_memory_that_is_not_free_is_refused_before_the_first_step() -> None:
    (found,) = run_ranks(refused_memory, 1, init={"device": "cuda"})
    assert found.startswith("0 states, device_memory=1,099,511,627,776 bytes")
    assert "do not fit on cuda:0 of rank 0" in found and "1,048,576 bytes free" in found
