"""BMTrain's config, before and in a run."""

from __future__ import annotations

from typing import Any

import pytest

import bmtrain
from bmt_core import Topology
from bmt_core.testing import run_ranks
from bmtrain import global_var
from bmtrain.global_var import config


def state() -> dict[str, Any]:
    comms = ["comm", "zero_comm", "tp_comm", "tp_zero_comm", "pipe_comm", "pp_zero_comm", "pp_tp_zero_comm"]
    with pytest.raises(AttributeError, match="No config key is named 'wrold_size'"):
        config.wrold_size
    with pytest.raises(TypeError):
        config["rank"] = 3  # type: ignore[index]
    config["calc_stream"].wait_stream(config.load_stream)
    for name in ("tp_comm_stream", "pp_comm_stream", "barrier_stream", "load_stream"):
        config[name].synchronize()
    config.load_event.record()
    assert isinstance(config.topology, Topology)
    assert set(config) >= {"initialized", "rank", "topology", *comms}
    return {"groups": {name: config[name].ranks for name in comms}, "rank": config.rank, "tp": config["tp_size"]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_config_answers_every_key_and_single_groups_for_missing_axes(world_size: int) -> None:
    everyone = tuple(range(world_size))
    for rank, seen in enumerate(run_ranks(state, world_size)):
        alone = {"tp_comm", "pipe_comm"}
        assert seen["rank"] == rank and seen["tp"] == 1
        assert seen["groups"] == {name: (rank,) if name in alone else everyone for name in seen["groups"]}


def test_config_before_init_has_the_answers_of_one_rank_and_an_error_for_the_rest() -> None:
    assert dict(config) == {"initialized": False, "rank": 0, "world_size": 1}
    assert config.initialized is False and len(config) == 3
    with pytest.raises(RuntimeError, match="not initialised"):
        config["topology"]


def test_config_is_one_object_under_both_names() -> None:
    assert bmtrain.config is config and bmtrain.global_var is global_var
