"""BMTrain's names of where a rank is in the grid, and of where its part of a parameter lies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bmtrain as bmt
from bmt_testing import on_ranks

GRIDS = list(itertools.product((1, 2, 4), repeat=3))


@given(st.sampled_from(GRIDS), st.integers(0, 63))
def test_attributes_of_the_topology_follow_their_formulas(
    grid: tuple[int, int, int], rank: int
) -> None:
    pp, dp, tp = grid
    world = pp * dp * tp
    rank %= world
    t: Any = bmt.init.topology({"pp": pp, "dp": dp, "tp": tp}, rank, same_data={"tp"})
    stage = world // pp
    assert (t.stages, t.pipe_idx, t.stage_id) == (pp, rank % stage, rank // stage)
    assert (t.tp_id, t.tp_idx) == (rank % tp, rank // tp)
    assert (t.pp_zero_idx, t.pp_zero_id, t.tp_zero_idx, t.tp_zero_id) == (
        t.stage_id,
        t.pipe_idx,
        t.tp_id,
        t.tp_idx,
    )
    assert (t.pp_tp_zero_idx, t.pp_tp_zero_id) == (t.stage_id * tp + t.tp_id, t.pipe_idx // tp)
    assert (t.zero_idx, t.zero_id) == (0, rank)
    names = ("pipe", "zero", "tp_zero", "tp")
    assert [t.get_group_id(n) for n in names] == [t.pipe_idx, 0, t.tp_zero_idx, t.tp_idx]
    assert [t.get_group_rank(n) for n in names] == [t.stage_id, rank, t.tp_zero_id, t.tp_id]


def test_unknown_group_names_are_refused() -> None:
    with pytest.raises(
        bmt.ConfigError, match=r"No group is named 'dp'. Known: pipe, tp, tp_zero, zero"
    ):
        bmt.init.topology({"dp": 2}).get_group_id("dp")


@on_ranks(2)
def test_a_parameters_part_is_known_by_where_it_starts_and_ends() -> None:
    data = torch.arange(15.0).view(5, 3)
    parameter: Any = bmt.DistributedParameter(data)
    assert parameter.tp_gather().equal(data)
    own = (parameter._start_partition, parameter._end_partition)
    assert own == ((0, 8), (8, 15))[bmt.rank()]
    assert tuple(parameter._original_shape) == (5, 3)


@on_ranks(2)
def test_copy_data_takes_the_whole_tensor() -> None:
    parameter: Any = bmt.DistributedParameter(torch.zeros(5, 3))
    version = parameter._version
    parameter._copy_data(torch.arange(15.0).view(5, 3))
    assert parameter._version > version
    assert parameter.gather().flatten().tolist() == list(range(15))
