"""``DistributedParameter``, ``DistributedModule`` and initialisation."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from scratch_axes import SLICE, grid_with
from torch import nn

from bmt_core.run import runtime
from bmt_params.guards.first_values import FirstValues
from bmt_params.init.parameter_init import (
    ParameterInitializer,
    grouped_parameters,
    init_parameters,
    iterate_parameters,
)
from bmt_params.locality import Locality
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, run_ranks
from cells import cells

SHAPES: list[tuple[int, ...]] = [(5, 3), (1,), (2, 2, 2), (0, 4), (), (7,)]


def owned(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    data = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    parameter = DistributedParameter(data, requires_grad=dtype.is_floating_point)
    assert isinstance(parameter, nn.Parameter) and parameter.dim() == 1 and parameter.dtype == dtype
    assert parameter.full_shape == parameter.ds_shape == torch.Size(shape)
    # What decides by them decides as for the whole.
    assert parameter.ndim == parameter.data.ndim == len(shape)
    assert parameter.detach().ndim == 1
    assert parameter.is_part == (runtime.world_size() > 1)
    torch.testing.assert_close(parameter.gather().detach(), data)
    torch.testing.assert_close(parameter.gather_all().detach(), data)
    return {
        "part": parameter.detach().tolist(),
        "range": (parameter.shard.start, parameter.shard.end),
    }


OWNED = [
    (shape, dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8) for shape in SHAPES
]


def all_owned() -> list[dict[str, Any]]:
    return [owned(shape, dtype) for shape, dtype in OWNED]


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_element_is_on_one_rank_for_any_shape_and_dtype(world_size: int) -> None:
    for (shape, dtype), *parts in zip(OWNED, *run_ranks(all_owned, world_size), strict=True):
        whole = [value for part in parts for value in part["part"]]
        assert whole == torch.arange(torch.Size(shape).numel()).to(dtype).flatten().tolist()
        assert all(part["range"][1] - part["range"][0] == len(part["part"]) for part in parts)


@on_ranks(1, 4)
@cells("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gather_is_differentiable_and_sums_over_ranks(dtype: torch.dtype, world_size: int) -> None:
    parameter = DistributedParameter(torch.arange(10.0, dtype=dtype).view(5, 2))
    for factor in (1.0, 2.0):
        whole = parameter.gather()
        (whole * (runtime.rank() + 1) * factor).sum().backward()
    assert (
        parameter.grad is not None
        and parameter.grad.dtype == dtype
        and parameter.grad.shape == parameter.shape
    )
    (asked,) = torch.autograd.grad(parameter.gather().sum(), parameter)
    expected = 3.0 * sum(range(1, world_size + 1))
    assert parameter.gather_like(parameter.grad).tolist() == [[expected] * 2] * 5
    assert parameter.gather_like(asked).tolist() == [[float(world_size)] * 2] * 5


@on_ranks(2)
@cells(("clear", "expected"), [("", 260.0), ("none", 2.0), ("zero", 2.0)])
def test_half_gradients_accumulate_exactly_and_clearing_clears(clear: str, expected: float) -> None:
    parameter = DistributedParameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    for gradient in (256, 1, 1, 1, 1):  # in bfloat16 256 + 1 is 256
        (parameter.gather() * gradient / runtime.world_size()).sum().backward()
    if clear == "none":
        parameter.grad = None
    elif clear == "zero" and parameter.grad is not None:
        parameter.grad.zero_()
    if clear:
        parameter.gather().sum().backward()
    assert parameter.grad is not None
    assert parameter.gather_like(parameter.grad).flatten().tolist() == [expected] * 15


@on_ranks(4)
def test_half_gradients_are_summed_over_ranks_in_float32() -> None:
    """Of each element one rank has the gradient 256, another one for each, and the others 1."""
    parameter = DistributedParameter(torch.zeros(4, dtype=torch.bfloat16))
    x = torch.ones(4)
    x[runtime.rank()] = 256
    (parameter.gather() * x).sum().backward()
    assert parameter.grad is not None
    # 259, rounded once. In bfloat16 256 + 1 is 256: whatever the order of the sums, some element
    # would come to less.
    assert parameter.gather_like(parameter.grad).tolist() == [260.0] * 4


class Tower(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(
            torch.empty(5, 3), init_method=ParameterInitializer(nn.init.normal_, mean=0.0, std=2.0)
        )
        self.bias = DistributedParameter(torch.empty(5), init_method=nn.init.uniform_)
        self.plain = nn.Parameter(torch.ones(2))
        self.twin = Leaf(self._parameters["weight"])
        self.register_buffer("steps", torch.tensor([1, 2], dtype=torch.uint8))
        # Whole, also during construction.
        assert type(self.weight * 1) is torch.Tensor and self.weight.shape == (5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.linear(x, self.weight, self.bias) @ self.weight
            + self.twin(x)
            + self.weight.sum()
        )


class Leaf(DistributedModule):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).sum(1, keepdim=True)


def counted(calls: dict[str, int], name: str, operation: Any, *args: Any) -> Any:
    calls[name] += 1
    return operation(*args)


def counted_reads() -> tuple[int, int]:
    """Count through the groups that the parameter uses."""
    tower = Tower()
    init_parameters(tower)
    runtime.current().state(FirstValues).compare()  # as the first call does
    group = tower._parameters["weight"].shard_group  # type: ignore[union-attr]
    lanes = runtime.current().lanes
    calls = {"all_gather": 0, "reduce_scatter": 0}
    for used in {group, lanes.gather.group(group), lanes.reduce.group(group)}:
        for name in calls:
            setattr(used, name, functools.partial(counted, calls, name, getattr(used, name)))
    tower(torch.ones(2, 3)).sum().backward()
    return calls["all_gather"], calls["reduce_scatter"]


def test_one_gather_and_one_reduce_of_each_parameter_per_forward_however_often_it_is_read() -> None:
    # Two parameters, each by itself: without bmt-zero nothing gathers them together.
    assert run_ranks(counted_reads, 2) == [(2, 2)] * 2


@on_ranks(2)
def test_state_dict_takes_and_gives_whole_tensors_buffers_and_plain_parameters() -> None:
    tower = Tower()
    init_parameters(tower)
    wanted = {
        "weight": torch.randn(5, 3),
        "bias": torch.randn(5),
        "plain": torch.randn(2),
        "steps": torch.tensor([7, 8], dtype=torch.uint8),
    }
    wanted["twin.weight"] = wanted["weight"]
    tower.load_state_dict(wanted)
    torch.testing.assert_close(dict(tower.state_dict()), wanted)
    with pytest.raises(
        RuntimeError, match=r"weight: the checkpoint has shape \(3, 5\), the model \(5, 3\)"
    ):
        tower.load_state_dict(
            {**wanted, "weight": torch.zeros(3, 5), "twin.weight": torch.zeros(3, 5)}
        )


@on_ranks(2)
def test_copies_and_pickles_keep_shard_group_and_init_method() -> None:
    parameter = DistributedParameter(
        torch.arange(7.0), True, ParameterInitializer(nn.init.ones_), "some"
    )
    parameter.grad = torch.ones_like(parameter)
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(parameter), torch.load(buffer, weights_only=False)):
        assert (
            type(twin) is DistributedParameter
            and twin.shard_group is parameter.shard_group
            and twin is not parameter
        )
        assert twin.grad is None  # as of a copy of torch's Parameter
        assert twin.full_shape == (7,) and twin._init_method is not None and twin.group == "some"
        with torch.no_grad():
            twin.add_(1)
        torch.testing.assert_close(twin.gather() - 1, parameter.gather())
    assert "shape=(7,)" in repr(parameter)


@on_ranks(4, init=grid_with(SLICE))
def test_libraries_see_the_shape_of_the_whole_and_not_of_a_slice() -> None:
    parameter = DistributedParameter(torch.empty(3, 2), locality=[Locality("slice", split_dim=1)])
    assert parameter.full_shape == (3, 2)
    assert parameter.whole_shape == parameter.ds_shape == (3, 4)


@on_ranks(2)
def test_grouped_parameters_gives_each_parameter_once_by_its_label() -> None:
    tower = Tower()
    tower.head = DistributedParameter(torch.zeros(3), group="head")
    tower.twin.add_module("again", Leaf(tower._parameters["head"]))
    copied = copy.deepcopy(tower)
    assert {*iterate_parameters(copied)} == {*copied.parameters()}
    alone = DistributedParameter(torch.arange(4.0), group=runtime.current().topology.group(()))
    assert alone.group is None and alone.shard_group.size == 1 and alone.numel() == 4
    groups = [(group, len(parameters)) for group, parameters in grouped_parameters(copied)]
    assert groups == [(None, 3), ("head", 1)]


@on_ranks(2)
def test_a_parameter_is_gathered_on_all_ranks_or_on_one() -> None:
    data = torch.arange(15.0).view(5, 3)
    parameter = DistributedParameter(data)
    assert (
        parameter.is_sharded
        and not DistributedParameter(data, group=runtime.current().topology.group(())).is_sharded
    )
    assert parameter.gather_all().equal(data)
    assert parameter.own_slice(data) is data  # of which the part is sharded
    with pytest.raises(ValueError, match=r"Expected a tensor of shape \(5, 3\), not \(3, 5\)"):
        parameter.own_slice(data.t())
    own, ranges = parameter.saved_elements()
    assert parameter.detach()[own].equal(
        torch.cat([data.flatten()[start:end] for start, end in ranges])
    )
    on_1 = parameter.gather_on(1)
    assert (on_1 is not None and on_1.equal(data)) == (runtime.rank() == 1)
    assert (parameter._shard.start, parameter._shard.end) == [(0, 8), (8, 15)][runtime.rank()]


def test_sections_of_a_dim_are_cut_each_by_itself() -> None:
    place, whole = Locality("tp", split_dim=0, sections=(4, 2)), torch.arange(6.0)
    slices = [place.cut(whole, rank, 2) for rank in range(2)]
    assert [part.tolist() for part in slices] == [[0, 1, 4], [2, 3, 5]]
    assert place.join(slices).equal(whole)
    assert [place.ranges((6,), rank, 2) for rank in range(2)] == [
        [(0, 2), (4, 5)],
        [(2, 4), (5, 6)],
    ]


@on_ranks(2)
def test_wrong_values_are_named_and_writes_through_data_are_seen() -> None:
    parameter = DistributedParameter(torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match=r"Expected a tensor of shape \(2, 3\), not \(3, 2\)"):
        parameter.local_part(torch.zeros(3, 2))
    with pytest.raises(TypeError, match="made of a tensor, not of list"):
        DistributedParameter([1.0])  # type: ignore[arg-type]
    version = parameter._version
    parameter.data.mul_(2)
    assert parameter._version > version  # unlike torch's .data, writes are seen
    torch.testing.assert_close(parameter.gather().detach(), torch.arange(6.0).view(2, 3) * 2)


def dropout_streams() -> tuple[list[float], float]:
    class Drop(DistributedModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x)

    module = Drop()
    x = torch.ones(64)
    first = module(x)
    with torch.random.fork_rng():
        pass
    again = torch.utils.checkpoint.checkpoint(module, x.requires_grad_(), use_reentrant=False)
    again.sum().backward()
    # The user's own checkpointing too.
    assert x.grad is not None and torch.equal(x.grad, again.detach())
    return first.tolist(), float(torch.rand(()))


def test_dropout_differs_between_ranks_and_the_shared_stream_does_not() -> None:
    (mask0, shared0), (mask1, shared1) = run_ranks(dropout_streams, 2)
    assert mask0 != mask1 and shared0 == shared1


def test_dropout_is_alike_on_ranks_with_the_same_data() -> None:
    masks = [mask for mask, _ in run_ranks(dropout_streams, 4, init=grid_with(SLICE))]
    assert masks[0] == masks[1] and masks[2] == masks[3] and masks[0] != masks[2]
