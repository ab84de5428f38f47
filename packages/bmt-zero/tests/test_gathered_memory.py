"""What a step takes beside what is kept, and that no step takes more than the one before it."""

from __future__ import annotations

import pytest
import torch
from memory_models import grown, objects_left, objects_of_ours_left, steps_without_synchronising, transient

from bmt_testing import run_ranks
from bmt_zero import GatheredMemory

# Activations, and on CUDA the rounding of the allocator.
SLACK = 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_step_takes_two_blocks_of_parameters_and_two_of_gradients(use_checkpoint: bool, dtype: torch.dtype) -> None:
    for taken, shards in run_ranks(transient, 2, use_checkpoint, dtype):
        assert taken - shards <= 4 + SLACK


@pytest.mark.gpu
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_a_step_takes_two_blocks_of_parameters_and_two_of_gradients(use_checkpoint: bool) -> None:
    for taken, shards in run_ranks(transient, 2, use_checkpoint, torch.float32, init={"device": "cuda"}, timeout=120):
        assert taken - shards <= 4 + SLACK


@pytest.mark.parametrize(("level", "use_checkpoint"), [(0, False), (1, True), (2, False), (3, True)])
def test_steps_leave_nothing_behind(level: int, use_checkpoint: bool) -> None:
    assert run_ranks(grown, 2, level, use_checkpoint, 30) == [(0,)] * 2


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_nothing_is_left_to_the_garbage_collector(level: int, use_checkpoint: bool) -> None:
    for left in run_ranks(objects_left, 2, level, use_checkpoint):
        assert left < 40  # less than one object per step


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_nothing_is_left_of_parts_that_backward_called_again(use_checkpoint: bool) -> None:
    for left in run_ranks(objects_of_ours_left, 2, use_checkpoint):
        assert left < 40


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_a_hundred_steps_take_no_more_memory(level: int, use_checkpoint: bool) -> None:
    found = run_ranks(grown, 2, level, use_checkpoint, 100, init={"device": "cuda"}, timeout=120)
    assert found == [(0, 0)] * 2  # allocated and reserved


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_no_step_waits_for_the_device(level: int, use_checkpoint: bool) -> None:
    run_ranks(steps_without_synchronising, 2, level, use_checkpoint, init={"device": "cuda"}, timeout=120)


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
