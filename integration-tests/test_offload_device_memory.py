"""``AdamOffloadOptimizer(..., device_memory=...)`` trains what ``AdamOptimizer`` trains, with the
states of some Blocks on the device. Here the host takes the part of the device: see
``test_offload.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from offload_training import Offload, RestlessOffload, SplitOffload, Training, both

from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer
from bmt_optim.offload.placement import DeviceRoom
from bmt_testing import run_ranks


@pytest.mark.parametrize("kind", [SplitOffload, RestlessOffload])
@pytest.mark.parametrize(("world_size", "every"), [(1, 2), (2, 3)])
def test_with_some_states_on_the_device_training_equals_that_of_adam_in_every_bit(
    kind: Any, world_size: int, every: int
) -> None:
    for results in run_ranks(both, world_size, kind, torch.float32, every):
        for settings, expected, found in results:
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), settings


def parameters_on_the_device(device_memory: int) -> tuple[list[bool], list[bool]]:
    """Return of the parameters of three Blocks, and of the embedding and the head, whether the
    device has their states.
    """
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

    blocks = [is_on_device(f"layers.{number}.") for number in range(3)]
    return blocks, [is_on_device("embedding"), is_on_device("head")]


def test_the_first_blocks_of_the_forward_pass_keep_their_states_on_the_device() -> None:
    bytes_of_embedding, bytes_of_block = 8 * 66, 8 * (12 + 91 + 78 + 3)
    for memory, blocks, ends in (
        (0, [False] * 3, [False] * 2),
        (bytes_of_embedding, [False] * 3, [True, False]),
        (bytes_of_embedding + bytes_of_block, [True, False, False], [True, False]),
        (1 << 19, [True] * 3, [True] * 2),
    ):
        assert run_ranks(parameters_on_the_device, 1, memory) == [(blocks, ends)]


def trained_while_states_move_and_parameters_freeze(kind: Any) -> list[torch.Tensor]:
    training = Training(kind)
    block = [p for name, p in training.model.named_parameters() if name.startswith("layers.0.")]
    for step, memory in enumerate((0, 1 << 19, 0, 1 << 19, 0)):
        if kind is Offload:
            training.optimizer.device_memory = memory
        for number, p in enumerate(block):  # frozen ones do not move
            p.requires_grad_(step % 2 == 0 or number % 2 == 1)
        training.step(step)
    return training.whole()


def test_states_of_a_block_in_which_some_parameters_are_frozen_move_without_loss() -> None:
    expected, found = (
        run_ranks(trained_while_states_move_and_parameters_freeze, 2, kind)[0]
        for kind in (AdamOptimizer, Offload)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class TightOffload(Offload):
    """Rank 1 has less room."""

    def _device_room(self) -> DeviceRoom:
        room = super()._device_room()
        room._free[torch.device("cpu")] = 4000 - 1500 * runtime.rank()
        return room


def too_much_memory() -> tuple[list[str], bool]:
    training = Training(functools.partial(TightOffload, device_memory=3000))
    straight = Training(AdamOptimizer)
    optimizer = training.optimizer
    assert isinstance(optimizer, Offload)
    messages = []
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            training.step(0)
        messages.append(str(raised.value))
    optimizer.device_memory = 2000
    for number in range(2):
        training.step(number)
        straight.step(number)
    return messages, all(
        torch.equal(a, b) for a, b in zip(straight.whole(), training.whole(), strict=True)
    )


def test_memory_that_one_rank_lacks_is_refused_on_all_before_anything_changes() -> None:
    for messages, is_equal in run_ranks(too_much_memory, 2):
        assert messages[0] == messages[1] and is_equal
        for part in ("device_memory=3,000 bytes", "cpu of rank 1", "2,500 bytes free"):
            assert part in messages[0]
