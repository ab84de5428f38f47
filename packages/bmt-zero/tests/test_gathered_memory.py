"""What a step holds of gathered parameters, what it takes beside what is kept, and that no step
leaves anything behind.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from meta_models import MemoryMeter
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import all_weights

from bmt_core.run.runtime import current
from bmt_testing import on_ranks
from bmt_zero import Block, GatheredMemory, TransformerBlockList, gathered_memory
from cells import cells

BLOCKS, WIDTH = 8, 256


class Layer(nn.Module):
    """Parameters of half a megabyte, activations of some kilobytes; ``scale`` is no
    linear layer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.scale
        return out


def blocks(
    level: int,
    use_checkpoint: bool,
    dtype: torch.dtype = torch.float32,
    kind: type[Layer] = Layer,
    count: int = BLOCKS,
) -> TransformerBlockList:
    torch.manual_seed(1)
    layers = [kind().to(current().device, dtype) for _ in range(count)]
    return TransformerBlockList([Block(layer, use_checkpoint, level) for layer in layers])


class InParts(Layer):
    """A part of it is called again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def step(model: nn.Module) -> None:
    parameter = next(model.parameters())
    model(
        torch.ones(2, WIDTH, dtype=parameter.dtype, device=parameter.device)
    ).float().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-4)
            parameter.grad = None


def block_bytes(model: Any) -> int:
    """Bytes of one block's full parameters, with padding."""
    return int(model[0]._bmt_block.state.groups[0].flat.full_bytes)


@on_ranks(2)
@cells(("level", "use_checkpoint", "most"), [(3, False, 2), (3, True, 2), (2, False, 6)])
def test_level_3_holds_two_gathered_blocks_and_level_2_all_until_their_backward(
    level: int, use_checkpoint: bool, most: int
) -> None:
    model: Any = nn.Sequential(*[Block(nn.Linear(64, 64), use_checkpoint, level) for _ in range(6)])
    gathered_memory.reset_peak()
    seen: list[int] = []

    def note(*_: Any) -> None:
        groups = [group for block in model for group in block._bmt_block.state.groups]
        seen.append(sum(group.buffer.tensor.untyped_storage().nbytes() for group in groups))

    for module in model:
        module.register_forward_pre_hook(note)
        module.register_full_backward_hook(note)
    for _ in range(2):
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    counted, measured = gathered_memory.peak / block_bytes(model), max(seen) / block_bytes(model)
    assert 1 <= measured <= counted <= most
    assert level == 3 or measured == most
    assert gathered_memory.current == 0


@on_ranks(2)
def test_a_level_that_changes_between_calls_says_what_stays_gathered() -> None:
    block, gathered = Block(nn.Linear(64, 64), zero_level=3), []
    for block._zero_level in (3, 1, 2):
        block(torch.ones(2, 64)).sum().backward()
        gathered.append(gathered_memory.current)
    assert gathered == [0, block_bytes([block]), 0]


@on_ranks(2)
def test_a_block_that_goes_takes_what_was_gathered_with_it() -> None:
    block = Block(nn.Linear(64, 64), zero_level=1)
    block(torch.ones(2, 64))
    assert gathered_memory.current == block_bytes([block])
    del block
    gc.collect()
    assert gathered_memory.current == 0


def check_what_a_step_takes(use_checkpoint: bool, dtype: torch.dtype) -> None:
    """The gradients of the shards, two blocks of parameters and two of gradients."""
    on_gpu = current().device.type == "cuda"
    meter = MemoryMeter()
    with nullcontext() if on_gpu else meter:
        model = blocks(3, use_checkpoint, dtype)
        for _ in range(2):
            step(model)
        if on_gpu:
            torch.cuda.synchronize()
            rest = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            rest = meter.peak = meter.current
        step(model)
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if on_gpu else meter.peak
    shards = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    # A quarter of a block for activations, and on CUDA for the rounding of the allocator.
    assert (peak - rest - shards) / block_bytes(model) <= 4.25


@on_ranks(2)
@cells("dtype", [torch.float32, torch.bfloat16])
@cells("use_checkpoint", [False, True])
@all_weights
def test_a_step_takes_two_blocks_of_parameters_and_two_of_gradients(
    use_checkpoint: bool, dtype: torch.dtype
) -> None:
    check_what_a_step_takes(use_checkpoint, dtype)


@pytest.mark.gpu
@on_ranks(2, init={"device": "cuda"}, timeout=120)
@pytest.mark.parametrize("use_checkpoint", [False, True])
@all_weights
def test_on_gpus_a_step_takes_two_blocks_of_parameters_and_two_of_gradients(
    use_checkpoint: bool,
) -> None:
    check_what_a_step_takes(use_checkpoint, torch.float32)


def check_that_steps_leave_nothing(level: int, use_checkpoint: bool, steps: int) -> None:
    """The last ten steps leave no more memory than ten early ones: allocated, and on CUDA reserved.

    The least of ten: a thread of gloo's may still hold for a moment what it has sent.
    """
    on_gpu = current().device.type == "cuda"
    model = blocks(level, use_checkpoint, count=4)
    meter = MemoryMeter()
    present: list[tuple[int, ...]] = []
    with nullcontext() if on_gpu else meter:
        for _ in range(steps):
            step(model)
            if on_gpu:
                torch.cuda.synchronize()
                present.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            else:
                present.append((meter.current,))
    early, late = (
        [min(each) for each in zip(*some, strict=True)] for some in (present[5:15], present[-10:])
    )
    assert late == early


@on_ranks(2)
@cells(("level", "use_checkpoint"), [(0, False), (1, True), (2, False), (3, True)])
def test_steps_leave_nothing_behind(level: int, use_checkpoint: bool) -> None:
    check_that_steps_leave_nothing(level, use_checkpoint, 30)


@pytest.mark.gpu
@on_ranks(2, init={"device": "cuda"}, timeout=120)
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_a_hundred_steps_take_no_more_memory(level: int, use_checkpoint: bool) -> None:
    check_that_steps_leave_nothing(level, use_checkpoint, 100)


def objects_left(model: nn.Module, modules: tuple[str, ...] = ("",)) -> int:
    """How many more objects of ``modules`` there are after 180 steps than after 140, without the
    garbage collector. The first steps fill what a rank keeps of its last calls, also without it,
    because it ceases to count tuples of texts.
    """

    def count() -> int:
        return len(
            [found for found in gc.get_objects() if str(type(found).__module__).startswith(modules)]
        )

    gc.collect()
    gc.disable()
    try:
        for _ in range(140):
            step(model)
        before = count()
        for _ in range(40):
            step(model)
        return count() - before
    finally:
        gc.enable()


@on_ranks(2)
@cells(("level", "use_checkpoint"), [(0, True), (1, False), (2, True), (3, False)])
def test_nothing_is_left_to_the_garbage_collector(level: int, use_checkpoint: bool) -> None:
    # Less than one object per step.
    assert objects_left(blocks(level, use_checkpoint, count=2)) < 40


@on_ranks(2)
@cells("use_checkpoint", [False, True])
def test_nothing_is_left_of_parts_that_backward_called_again(use_checkpoint: bool) -> None:
    """Tensors and objects of ours: torch's checkpoint leaves functions behind."""
    assert objects_left(blocks(3, use_checkpoint, kind=InParts, count=2), ("torch", "bmt")) < 40


@pytest.mark.gpu
@on_ranks(2, init={"device": "cuda"}, timeout=120)
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_no_step_waits_for_the_device(level: int, use_checkpoint: bool) -> None:
    model = blocks(level, use_checkpoint, torch.bfloat16)
    for _ in range(2):
        step(model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # of operations for which the host waits
    try:
        for _ in range(3):
            step(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_peak_is_the_highest_since_it_was_reset() -> None:
    memory = GatheredMemory()
    memory.change(3, memory.run)
    memory.change(-2, memory.run)
    assert (memory.current, memory.peak) == (1, 3)
    memory.reset_peak()
    assert (memory.current, memory.peak) == (1, 1)


def test_buffers_of_an_earlier_run_do_not_count() -> None:
    memory = GatheredMemory()
    memory.begin_run()
    memory.change(3, memory.run)
    earlier = memory.run
    memory.begin_run()
    memory.change(-3, earlier)
    assert (memory.current, memory.peak) == (0, 0)
    memory.change(2, memory.run)
    assert (memory.current, memory.peak) == (2, 2)
