"""The rank grid against a brute-force definition, for every grid up to 64 ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_core.run.topology import Topology, grid_sizes
from bmt_core.settings import MeshAxis
from bmt_core.testing import run_ranks

AXES = ("pp", "dp", "tp")
GRIDS = [
    (pp, dp, tp)
    for pp in range(1, 65)
    for dp in range(1, 65 // pp + 1)
    for tp in range(1, 65 // (pp * dp) + 1)
    if pp * dp * tp <= 64
]


def coordinates(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rank -> coordinates: by the definition of row-major order."""
    return list(itertools.product(*[range(size) for size in grid]))


@given(st.sampled_from(GRIDS), st.sets(st.sampled_from(AXES)))
def test_groups_equal_the_brute_force_definition(grid: tuple[int, int, int], along: set[str]) -> None:
    place = coordinates(grid)
    fixed = [i for i, name in enumerate(AXES) if name not in along]
    topology = Topology(dict(zip(AXES, grid, strict=True)))
    groups = topology.ranks(along)
    for group in groups:
        first = place[group[0]]
        expected = tuple(r for r in range(len(place)) if all(place[r][i] == first[i] for i in fixed))
        assert group == expected
    assert sorted(rank for group in groups for rank in group) == list(range(len(place)))


def test_every_grid_up_to_64_ranks_gives_each_rank_its_coordinates() -> None:
    for grid in GRIDS:
        sizes = dict(zip(AXES, grid, strict=True))
        topology = Topology(sizes)
        for rank, place in enumerate(coordinates(grid)):
            assert tuple(topology.axis_rank(name, rank) for name in AXES) == place
        for count in range(4):
            for local in itertools.combinations(AXES, count):
                assert topology.shard_ranks(local) == topology.ranks(set(AXES) - set(local))


@given(st.sampled_from(GRIDS), st.integers(0, 63))
def test_old_attributes_follow_their_formulas(grid: tuple[int, int, int], rank: int) -> None:
    pp, dp, tp = grid
    world = pp * dp * tp
    rank %= world
    t = Topology(dict(zip(AXES, grid, strict=True)), rank)
    stage = world // pp
    assert (t.stages, t.pipe_idx, t.stage_id) == (pp, rank % stage, rank // stage)
    assert (t.tp_id, t.tp_idx) == (rank % tp, rank // tp)
    assert (t.pp_zero_idx, t.pp_zero_id, t.tp_zero_idx, t.tp_zero_id) == (t.stage_id, t.pipe_idx, t.tp_id, t.tp_idx)
    assert (t.pp_tp_zero_idx, t.pp_tp_zero_id) == (t.stage_id * tp + t.tp_id, t.pipe_idx // tp)
    assert (t.zero_idx, t.zero_id, t.data_size) == (0, rank, world // tp)
    names = ("pipe", "zero", "tp_zero", "tp")
    assert [t.get_group_id(n) for n in names] == [t.pipe_idx, 0, t.tp_zero_idx, t.tp_idx]
    assert [t.get_group_rank(n) for n in names] == [t.stage_id, rank, t.tp_zero_id, t.tp_id]
    # Ranks that share data, and only they, share a data rank.
    others = [Topology(t.sizes, r).data_rank for r in range(world)]
    assert sorted(set(others)) == list(range(world // tp))
    assert others[rank] == t.data_rank == rank // tp


def test_unknown_group_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"No group is named 'dp'. Known: pipe, zero, tp_zero, tp"):
        Topology({"dp": 2}).get_group_id("dp")


def test_a_world_that_the_grid_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"World size 6 is not a multiple of pp=2 x tp=2 = 4"):
        grid_sizes([MeshAxis("pp", 2, 0), MeshAxis("tp", 2, 100)], 6)


def test_axes_lie_by_order_then_name() -> None:
    assert list(grid_sizes([MeshAxis("z", 1, 50), MeshAxis("a", 1, 50), MeshAxis("cp", 2, 75)], 4)) == [
        "a",
        "dp",
        "z",
        "cp",
    ]


def groups_of(sizes: dict[str, int]) -> dict[str, Any]:
    backend = runtime.current().backend
    topology = Topology(sizes, runtime.rank(), backend)
    made = {"+".join(axes): topology.group(axes) for axes in (("tp",), ("dp",), ("dp", "tp"), ())}
    assert topology.group(("tp", "pp")) is topology.group(("tp",))  # pp has one rank: the same group, made once
    assert topology.group_of(made["tp"].ranks) is made["tp"]
    with pytest.raises(ConfigError, match="are no group of rank"):
        topology.group_of((17, 18))
    return {name: (group.ranks, group.rank) for name, group in made.items()}


def test_real_groups_on_four_ranks() -> None:
    for rank, groups in enumerate(run_ranks(groups_of, 4, {"pp": 1, "dp": 2, "tp": 2})):
        assert groups["tp"] == ((rank // 2 * 2, rank // 2 * 2 + 1), rank % 2)
        assert groups["dp"] == ((rank % 2, rank % 2 + 2), rank // 2)
        assert groups["dp+tp"] == ((0, 1, 2, 3), rank)
        assert groups[""] == ((rank,), 0)
