"""``AdamOffloadOptimizer(..., device_memory=...)`` trains what ``AdamOptimizer`` trains, with the
states of some Blocks on the device. Here the host takes the part of the device: see
``test_offload.py``.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from offload_training import (
    Offload,
    RestlessOffload,
    SplitOffload,
    Training,
    assert_same_results,
    both,
)

from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer
from bmt_optim.offload.placement import DeviceRoom
from bmt_testing import on_ranks, run_ranks
from cells import cells


@pytest.mark.parametrize("kind", [SplitOffload, RestlessOffload])
@pytest.mark.parametrize(("world_size", "every"), [(1, 2), (2, 3)])
def test_with_some_states_on_the_device_training_equals_that_of_adam_in_every_bit(
    kind: Any, world_size: int, every: int
) -> None:
    for results in run_ranks(both, world_size, kind, torch.float32, every):
        for settings, expected, found in results:
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), settings


BYTES_OF_EMBEDDING, BYTES_OF_BLOCK = 8 * 66, 8 * (12 + 91 + 78 + 3)


@on_ranks(1)
@cells(
    "device_memory, blocks, embedding, head",
    [
        (0, 0, False, False),
        (BYTES_OF_EMBEDDING, 0, True, False),
        (BYTES_OF_EMBEDDING + BYTES_OF_BLOCK, 1, True, False),
        (1 << 19, 3, True, True),
    ],
)
def test_the_first_blocks_of_the_forward_pass_keep_their_states_on_the_device(
    device_memory: int, blocks: int, embedding: bool, head: bool
) -> None:
    training = Training(functools.partial(Offload, device_memory=device_memory))
    training.step(0)
    optimizer = training.optimizer
    assert isinstance(optimizer, Offload)
    named = dict(training.model.named_parameters())

    def is_on_device(prefix: str) -> bool:
        params = [p for name, p in named.items() if name.startswith(prefix) and p.requires_grad]
        found = {not optimizer._is_on_host(p) for p in params}
        assert len(found) == 1  # a Block's stay together
        return found.pop()

    found = [is_on_device(f"layers.{number}.") for number in range(3)]
    assert found == [number < blocks for number in range(3)]
    assert (is_on_device("embedding"), is_on_device("head")) == (embedding, head)


@on_ranks(2)
def test_states_of_a_block_in_which_some_parameters_are_frozen_move_without_loss() -> None:
    trainings = [Training(kind) for kind in (AdamOptimizer, Offload)]
    for training, (step, memory) in product(trainings, enumerate((0, 1 << 19, 0, 1 << 19, 0))):
        if isinstance(training.optimizer, Offload):
            training.optimizer.device_memory = memory
        named = training.model.named_parameters()
        block = [p for name, p in named if name.startswith("layers.0.")]
        for number, p in enumerate(block):  # frozen ones do not move
            p.requires_grad_(step % 2 == 0 or number % 2 == 1)
        training.step(step)
    assert_same_results(trainings)


class TightOffload(Offload):
    """Rank 1 has less room."""

    def _device_room(self) -> DeviceRoom:
        room = super()._device_room()
        room._free[torch.device("cpu")] = 4000 - 1500 * runtime.rank()
        return room


@on_ranks(2)
def test_memory_that_one_rank_lacks_is_refused_on_all_before_anything_changes() -> None:
    training = Training(functools.partial(TightOffload, device_memory=3000))
    straight = Training(AdamOptimizer)
    refusal = r"device_memory=3,000 bytes.*cpu of rank 1.*2,500 bytes free"
    for _ in range(2):
        with pytest.raises(ConfigError, match=refusal):
            training.step(0)
    assert isinstance(training.optimizer, Offload)
    training.optimizer.device_memory = 2000
    for number in range(2):
        training.step(number)
        straight.step(number)
    assert_same_results([straight, training])
