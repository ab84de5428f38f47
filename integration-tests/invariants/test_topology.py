"""Every group of ranks is that of the definition: the ranks whose other coordinates are the same.

The definition is brute force, and is tried for every grid of up to 64 ranks.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bmt_core.run.topology import Topology, grid_sizes
from bmt_core.settings import MeshAxis

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
def test_groups_equal_the_brute_force_definition(
    grid: tuple[int, int, int], along: set[str]
) -> None:
    place = coordinates(grid)
    fixed = [i for i, name in enumerate(AXES) if name not in along]
    topology = Topology(dict(zip(AXES, grid, strict=True)))
    groups = topology.ranks(along)
    for group in groups:
        first = place[group[0]]
        expected = tuple(
            r for r in range(len(place)) if all(place[r][i] == first[i] for i in fixed)
        )
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
def test_ranks_that_share_data_and_only_they_share_a_data_rank(
    grid: tuple[int, int, int], rank: int
) -> None:
    pp, dp, tp = grid
    world = pp * dp * tp
    rank %= world
    t = Topology(dict(zip(AXES, grid, strict=True)), rank, same_data={"tp"})
    assert t.data_size == world // tp
    assert bool(t.other_axes) == (pp * tp > 1)
    assert t.has_same_data == (tp > 1)
    others = [Topology(t.sizes, r, same_data={"tp"}).data_rank for r in range(world)]
    assert sorted(set(others)) == list(range(world // tp))
    assert others[rank] == t.data_rank == rank // tp


@given(st.sampled_from(GRIDS), st.integers(1, 64), st.sets(st.sampled_from(["pp", "tp"])))
def test_with_a_shard_size_the_nearest_ranks_share_a_tensor_and_the_others_have_the_same_parts(
    grid: tuple[int, int, int], shard_size: int, local: set[str]
) -> None:
    pp, data, tp = grid
    if data % shard_size:
        shard_size = 1
    axes = [MeshAxis("pp", pp, 0), MeshAxis("tp", tp, 100, shards_data=False)]
    t = Topology(grid_sizes(axes, pp * data * tp, shard_size), same_data={"tp"})
    hybrid, plain = t.shard_ranks(local), Topology(dict(zip(AXES, grid, strict=True)))
    replicas = t.ranks({"replica"})
    for whole in plain.shard_ranks(local):
        groups = [group for group in hybrid if group[0] in whole]
        # The ranks that shared the tensor still do: in groups, one after the other along dp.
        assert sorted(rank for group in groups for rank in group) == sorted(whole)
        assert len(groups) == data // shard_size
        for group in groups:
            places = {plain.axis_rank("dp", rank) for rank in group}
            first = min(places)
            assert places == set(range(first, first + shard_size)) and first % shard_size == 0
    for same in replicas:  # the same place in their groups
        found = {group.index(rank) for group in hybrid for rank in same if rank in group}
        assert len(found) == 1 and len(same) == data // shard_size
    assert t.data_size == pp * data
    for rank in range(t.world_size):
        hybrids = Topology(t.sizes, rank, same_data={"tp"})
        assert hybrids.data_rank == Topology(plain.sizes, rank, same_data={"tp"}).data_rank
