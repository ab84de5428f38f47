"""The rank grid: what is refused, and the groups of a run. That its groups are those of the
definition is in integration-tests/invariants/test_topology.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from scratch_axes import grid_with

from bmt_core.errors import CallError, ConfigError, NotInitializedError
from bmt_core.run import runtime
from bmt_core.run.topology import Topology, grid_sizes, kinds_of_axes
from bmt_core.settings import MeshAxis
from bmt_testing import on_ranks, rank_pool, run_ranks

TENSOR = MeshAxis("tp", 2, 100, shards_data=False)


def test_a_world_that_the_grid_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"6 ranks cannot be divided by 4 \(pipe_size=2 x tp_size=2\)"
    ):
        grid_sizes([MeshAxis("pp", 2, 0), MeshAxis("tp", 2, 100)], 6)


def test_axes_lie_by_order_then_name() -> None:
    assert list(
        grid_sizes([MeshAxis("z", 1, 50), MeshAxis("a", 1, 50), MeshAxis("cp", 2, 75)], 4)
    ) == [
        "a",
        "dp",
        "z",
        "cp",
    ]


def test_a_grid_is_seen_from_rank_0_unless_another_is_named() -> None:
    sizes = {"dp": 2, "tp": 2}
    assert repr(Topology(sizes)) == "Topology({'dp': 2, 'tp': 2}, rank=0)"
    assert [Topology(sizes).axis_rank(axis) for axis in sizes] == [0, 0]
    assert [Topology(sizes, 2).axis_rank(axis) for axis in sizes] == [1, 0]


@on_ranks(4, init=lambda _: grid_with(TENSOR))
def test_real_groups_on_four_ranks() -> None:
    rank, topology = runtime.rank(), runtime.current().topology
    expected: dict[tuple[str, ...], Any] = {
        ("tp",): ((rank // 2 * 2, rank // 2 * 2 + 1), rank % 2),
        ("dp",): ((rank % 2, rank % 2 + 2), rank // 2),
        ("dp", "tp"): ((0, 1, 2, 3), rank),
        (): ((rank,), 0),
    }
    groups = {axes: topology.group(axes) for axes in expected}
    assert {axes: (group.ranks, group.rank) for axes, group in groups.items()} == expected
    # Pp has one rank: the same group, made once.
    assert topology.group(("tp", "pp")) is groups["tp",]
    assert topology.group_of(groups["tp",].ranks) is groups["tp",]
    assert topology.twin(groups["tp",], "gather") is not groups["tp",]
    assert topology.twin(groups[()], "gather") is groups[()]
    with pytest.raises(ConfigError, match="are no group of rank"):
        topology.group_of((17, 18))


class Ranks:
    """A group, as far as a topology compares it."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks


def test_a_parameter_may_be_sharded_over_replicas_too() -> None:
    topology = Topology({"replica": 2, "dp": 3})
    assert topology.shard_ranks() == [(0, 1, 2), (3, 4, 5)]
    assert topology.shard_ranks(over_replicas=True) == [(0, 1, 2, 3, 4, 5)]


@on_ranks(4, init={"shard_size": 2})
def test_ranks_that_the_grid_does_not_give_a_parameter_are_a_users_choice() -> None:
    groups: list[Any] = [Ranks(0, 1), Ranks(0, 1, 2, 3), Ranks(0, 3)]
    if runtime.rank() == 0:
        topology = runtime.current().topology
        assert [topology.is_own_choice(group, ()) for group in groups] == [False, False, True]


def test_an_axis_whose_ranks_see_the_same_data_does_not_count_as_data() -> None:
    pipeline = MeshAxis("pp", 2, 0)
    assert run_ranks(data_place, 4, init=grid_with(pipeline, TENSOR)) == [
        (2, 0),
        (2, 0),
        (2, 1),
        (2, 1),
    ]
    assert run_ranks(data_place, 4, init=grid_with(pipeline)) == [(4, rank) for rank in range(4)]


def data_place() -> tuple[int, int]:
    topology = runtime.current().topology
    return topology.data_size, topology.data_rank


def sums_in_any_order() -> list[float]:
    """Rank 3 uses no group; the others use theirs in orders, and in numbers, of their own."""
    topology = runtime.current().topology
    rows, columns = topology.group(("dp",)), topology.group(("tp",))
    used = {
        0: [columns, topology.twin(columns, "gather"), rows],
        1: [columns, topology.twin(columns, "gather")],
        2: [rows],
    }
    sums = []
    for group in used.get(runtime.rank(), []):
        x = torch.tensor([runtime.rank() + 1.0])
        group.all_reduce(x).wait()
        sums.append(float(x))
    return sums


def test_a_group_connects_its_members_and_waits_for_nobody_else() -> None:
    results = run_ranks(sums_in_any_order, 4, init=grid_with(TENSOR))
    assert results == [[3.0, 3.0, 4.0], [3.0, 3.0], [4.0], []]


@on_ranks(4, init=lambda _: grid_with(MeshAxis("stage", 2, 0), MeshAxis("other", 2, 100)))
def test_the_first_operation_of_a_group_may_be_a_send() -> None:
    """A pipeline, whose first operation is a send or a receive."""
    group = runtime.current().topology.group(("stage",))
    x = torch.tensor([1.0])
    if group.rank > 0:
        group.recv(x, group.rank - 1).wait()
    x += group.rank
    if group.rank < group.size - 1:
        group.send(x, group.rank + 1).wait()
    assert x == 1 + runtime.rank() // 2


def waits_alone() -> str:
    group = runtime.current().topology.group(("tp",))
    if runtime.rank() != 0:
        return ""
    with pytest.raises(CallError) as caught:
        group.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_member_that_never_uses_the_group_is_an_error_for_the_others() -> None:
    said, *others = run_ranks(waits_alone, 4, init=grid_with(TENSOR, timeout=15), own_run=True)
    assert said.startswith(
        "Rank 1 has ended, and rank 0 waits for it in call 1 of group tp/main/0 (ranks 0, 1):"
        " the first"
    )
    assert others == [""] * 3


def sends_until_it_fails() -> str:
    """Rank 1 leaves with an error. Rank 0 starts sends to it, and waits for none."""
    group = runtime.current().world
    x, sent = torch.ones(1 << 16), []
    if runtime.rank() == 0:
        group.send(x, 1).wait()
        with pytest.raises(CallError) as caught:
            while True:
                sent.append(group.send(x, 1))
        return str(caught.value)
    group.recv(x, 0).wait()
    raise ValueError("planted")


def test_a_send_that_cannot_start_names_the_rank_that_is_gone() -> None:
    said, other = rank_pool(2).outcomes(sends_until_it_fails, init={"timeout": 30})
    assert other.error_message == "planted"
    assert re.match(
        r"Rank 1 has (ended|failed) \(ValueError: planted\).* This is rank 0, in a send to rank 1.",
        said.value,
    )


@on_ranks(4, init=lambda _: grid_with(TENSOR), own_run=True)
def test_a_group_that_never_connected_does_not_after_the_run() -> None:
    group = runtime.current().topology.group(("tp",))
    runtime.shutdown()
    with pytest.raises(NotInitializedError, match="given back by shutdown"):
        group.all_reduce(torch.ones(1))


def test_ranks_that_read_one_batch_may_compute_parts_of_one_sum() -> None:
    axes = [
        MeshAxis("tp", 2, 100, shards_data=False),
        MeshAxis("cp", 2, 75, shards_data=False, splits_sum=True),
    ]
    grid = Topology(grid_sizes(axes, 8), **kinds_of_axes(axes))
    assert list(grid.sizes) == ["dp", "cp", "tp"]
    places = [grid.of_rank(rank) for rank in range(8)]
    assert [place.data_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.sum_rank for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (grid.data_size, grid.sum_size) == (2, 4) and grid.parts_axes == ["cp"]


def test_an_axis_of_other_data_cannot_have_one_loss() -> None:
    with pytest.raises(ConfigError, match="shards_data=True and splits_sum=False"):
        MeshAxis("ep", 2, 10, splits_sum=False)


@on_ranks(4, init=lambda _: grid_with(MeshAxis("ring", 2, 75, shards_data=False, splits_sum=True)))
def test_the_ranks_of_one_sum_are_a_group() -> None:
    topology = runtime.current().topology
    assert topology.data_group.ranks == ((0, 2), (1, 3))[runtime.rank() % 2]
    assert topology.sum_group.ranks == (0, 1, 2, 3)
