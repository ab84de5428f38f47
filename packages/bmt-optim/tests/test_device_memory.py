"""``AdamOffloadOptimizer(device_memory=...)``: some states on the device, the rest on the host."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from offloaded import Offload, Room
from sharded_adam import give_gradients, parameters, train

from bmt_core.errors import ConfigError
from bmt_optim import AdamOptimizer
from pairwise import pairwise

EVERYTHING, SOME = 1 << 20, 200
"""Bytes: all parameters of these tests have 57 elements, whose states take 456 to 684."""


def state_bytes(optimizer: AdamOptimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )


def on_device(optimizer: Offload) -> list[bool]:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    return [not optimizer._is_on_host(p) for p in params]


def flats(optimizer: Offload) -> list[dict[str, torch.Tensor]]:
    """Return the flat tensors of each shard on the host."""
    return [shard.flat for shard in dict.fromkeys(optimizer._shards.values())]


def portable(optimizer: AdamOptimizer) -> list[dict[str, Any]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [copy.deepcopy(optimizer.portable_state(p)) for p in params]


def assert_equal(one: AdamOptimizer, other: AdamOptimizer) -> None:
    for groups in zip(one.param_groups, other.param_groups, strict=True):
        for a, b in zip(*(group["params"] for group in groups), strict=True):
            assert torch.equal(a, b)
    for found, expected in zip(portable(one), portable(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compact_master", [False, True])
def test_with_every_budget_it_steps_as_adam_does_in_every_bit(
    dtype: torch.dtype, compact_master: bool
) -> None:
    adam = AdamOptimizer(parameters(dtype), lr=0.01, compact_master=compact_master)
    train([0], adam)
    needed = state_bytes(adam)
    numbers = []
    for budget in (0, needed // 2, needed - 1, needed):
        adam = AdamOptimizer(parameters(dtype), lr=0.01, compact_master=compact_master)
        offload = Offload(
            parameters(dtype), lr=0.01, compact_master=compact_master, device_memory=budget
        )
        train(range(4), adam, offload)
        assert_equal(offload, adam)
        numbers.append(sum(on_device(offload)))
        taken = offload._placement.taken.get(torch.device("cpu"), 0)
        assert taken <= budget and (budget < needed or taken == needed)
    assert numbers[0] == 0 and numbers == sorted(numbers) and numbers[-1] == len(on_device(offload))
    assert 0 < numbers[1] < numbers[-1]


@pytest.mark.parametrize("compact_master", [None, True])
def test_states_move_without_loss_when_the_budget_changes(compact_master: bool | None) -> None:
    adam = AdamOptimizer(parameters(torch.bfloat16), lr=0.01, compact_master=compact_master)
    offload = Offload(parameters(torch.bfloat16), lr=0.01, compact_master=compact_master)
    train([0], adam, offload)
    host_memory = {flat["exp_avg"].data_ptr() for flat in flats(offload)}
    for step, budget in enumerate((EVERYTHING, 0, SOME, EVERYTHING, SOME, 0), start=1):
        offload.device_memory = budget
        if step % 2:  # a parameter that is written meanwhile keeps its new value
            for optimizer in (adam, offload):
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].mul_(1.25)
        train([step], adam, offload)
        assert_equal(offload, adam)
        assert any(on_device(offload)) == (budget > 0)
        assert all(on_device(offload)) == (budget == EVERYTHING)
        # A state on the device keeps no memory of the host's shards alive, which are flat.
        for p, state in offload.state.items():
            if p.numel() and not offload._is_on_host(p):
                mean = state["exp_avg"]
                assert mean.untyped_storage().nbytes() == mean.nbytes
                assert mean.data_ptr() not in host_memory
        host_memory = {flat["exp_avg"].data_ptr() for flat in flats(offload)}


@pytest.mark.parametrize(
    ("before", "after", "is_portable", "is_new"),
    pairwise(*2 * [[0, SOME, EVERYTHING]], *2 * [[False, True]]),
)
def test_a_state_does_not_say_where_it_was(
    before: int, after: int, is_portable: bool, is_new: bool
) -> None:
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
    saved = Offload(first, lr=0.01, device_memory=before)
    loaded = Offload(second, lr=0.01, device_memory=after)
    train(range(3), saved)
    if not is_new:
        train([9], loaded)
    with torch.no_grad():
        for p, q in zip(second, first, strict=True):
            p.copy_(q)
    if is_portable:
        for p, state in zip(second, portable(saved), strict=True):
            loaded.load_portable_state(p, state)
    else:
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    train(range(3, 5), saved, loaded)
    assert_equal(loaded, saved)


def test_memory_that_is_not_free_is_refused_before_anything_changes() -> None:
    params, twins = parameters(), parameters()
    offload, adam = Offload(params, lr=0.1, device_memory=400), AdamOptimizer(twins, lr=0.1)
    offload.room = Room(300)  # type: ignore[misc]
    give_gradients(params, 0)
    with pytest.raises(ConfigError, match=r"device_memory=400 bytes.*left 300 bytes free.*'auto'"):
        offload.step()
    assert not offload.state
    offload.device_memory = 300
    train(range(2), offload, adam)
    assert_equal(offload, adam)
    assert any(on_device(offload))


def test_more_than_all_states_need_is_no_error() -> None:
    offload = Offload(parameters(), lr=0.1, device_memory=EVERYTHING)
    train([0], offload)
    needed = state_bytes(offload)
    other = Offload(parameters(), lr=0.1, device_memory=EVERYTHING)
    other.room = Room(needed)  # type: ignore[misc]
    train([0], other)
    assert all(on_device(other))


def test_auto_takes_nine_tenths_of_what_other_optimizers_have_left() -> None:
    room = Room(400)
    first, second = (Offload(parameters(), lr=0.1, device_memory="auto") for _ in range(2))
    for offload in (first, second):
        offload.room = room  # type: ignore[misc]
        train([0], offload)
    cpu = torch.device("cpu")
    assert first._placement._limits[cpu] == 360
    assert second._placement._limits[cpu] == int((400 - first._placement.taken[cpu]) * 0.9)
    third = Offload(parameters(), lr=0.1, device_memory=400)
    third.room = room  # type: ignore[misc]
    del first, second, offload
    train([0], third)  # optimizers that are gone take nothing
    assert any(on_device(third))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_the_budget(copied: Any) -> None:
    offload = Offload(parameters(), lr=0.1, device_memory=SOME)
    train([0], offload)
    other = copied(offload)
    assert other.device_memory == SOME
    train([1], offload, other)
    assert_equal(other, offload)
    assert on_device(other) == on_device(offload)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "all"])
def test_other_budgets_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"device_memory must be a number of bytes"):
        Offload(parameters(), device_memory=value)
    offload = Offload(parameters())
    with pytest.raises(ValueError, match=r"device_memory must be a number of bytes"):
        offload.device_memory = value
    assert offload.device_memory == 0
