"""Parameters and buffers without values: marked, known on every rank, named, refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from bmt_core.errors import CheckpointError, ConfigError
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_params.uninitialized import (
    fill_with_nan,
    has_nan,
    has_values,
    list_names,
    mark_if_nan_is_left,
    mark_uninitialized,
    materialize_buffers,
    uninitialized_names,
)
from bmt_testing import run_ranks


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_one_forgotten_element_is_found(dtype: torch.dtype) -> None:
    tensor = fill_with_nan(torch.empty(3, 5, dtype=dtype))
    assert has_nan(tensor)
    tensor.view(-1)[:14] = float("-inf")
    assert has_nan(tensor)
    tensor.view(-1)[14] = float("inf")
    assert not has_nan(tensor)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.uint8, torch.float32, torch.float8_e4m3fn]
)
def test_a_mark_lasts_until_something_is_written(dtype: torch.dtype) -> None:
    tensor = torch.empty(4, dtype=dtype)
    mark_uninitialized(tensor)
    assert not has_values(tensor)
    tensor.clone()
    assert not has_values(tensor)
    tensor.copy_(torch.ones(4))
    assert has_values(tensor)
    assert not has_values(torch.empty(4, device="meta")) and has_values(
        torch.empty(0, device="meta")
    )


def test_a_buffer_written_in_part_has_no_values() -> None:
    buffer = torch.empty(4)
    mark_uninitialized(buffer)
    buffer[:3] = 0
    mark_if_nan_is_left(buffer)
    assert not has_values(buffer)
    buffer[3:] = 0
    mark_if_nan_is_left(buffer)
    assert has_values(buffer)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_copy_of_a_buffer_with_values_has_values(dtype: torch.dtype) -> None:
    buffer = torch.empty(4, dtype=dtype)
    mark_uninitialized(buffer)
    assert not has_values(copy.deepcopy(buffer))
    buffer.copy_(torch.ones(4))
    assert has_values(buffer) and has_values(copy.deepcopy(buffer))


def test_buffers_leave_the_meta_device_and_shared_ones_stay_shared() -> None:
    one, two = nn.Module(), nn.Module()
    one.register_buffer("mask", torch.empty(2, 3, device="meta"))
    two.register_buffer("mask", one.mask)
    two.register_buffer("scale", torch.ones(2))
    materialize_buffers([one, two], torch.device("cpu"))
    assert one.mask is two.mask and not one.mask.is_meta and one.mask.shape == (2, 3)
    assert uninitialized_names(two) == ([], ["mask"])


def test_many_names_are_cut_short() -> None:
    assert (
        list_names([f"p{i}" for i in range(9)], [])
        == "Parameters p0, p1, p2, p3, p4, p5 and 3 more"
    )
    assert list_names([], ["mask"]) == "Buffers mask"


class Holder(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        # One rank of four holds nothing of it, and must say the same as the others.
        self.weight = DistributedParameter(torch.empty(3, device="meta"))


def messages_of_reads() -> list[str]:
    holder = Holder()
    messages = []
    for use in (
        lambda: holder.weight,
        holder.state_dict,
        lambda: copy.deepcopy(holder).weight,
        lambda: pickle.loads(pickle.dumps(holder)).weight,
    ):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            use()
        messages.append(str(caught.value))
    holder.load_state_dict({"weight": torch.arange(3.0)})
    assert holder.weight.tolist() == [0, 1, 2]
    assert copy.deepcopy(holder).weight.tolist() == [0, 1, 2]
    return messages


def test_an_uninitialized_parameter_cannot_be_read_on_any_rank() -> None:
    for messages in run_ranks(messages_of_reads, 4):
        assert len(messages) == 4
        for message in messages:
            assert "made on the meta device" in message
        assert "shape (3,)" in messages[0]
