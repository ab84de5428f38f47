"""BMTrain's config, before and in a run."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch

import bmt_checkpoint.background
import bmt_core
import bmtrain
from bmt_core import Topology
from bmt_testing import on_ranks, run_ranks
from bmtrain import global_var
from bmtrain.global_var import ConfigMap, config


@on_ranks(2)
def test_config_has_the_numbers_of_the_run() -> None:
    streams = "calc_stream load_stream tp_comm_stream pp_comm_stream barrier_stream load_event"
    assert isinstance(config, ConfigMap)
    assert all(config[name] is not None for name in streams.split())
    alike = {"initialized": True, "pipe_enabled": False, "pipe_size": 1, "tp_size": 1, "tp_rank": 0}
    alike |= {"micros": 1, "num_micro_batches": 1, "zero_level": 3, "loss_scale_factor": 2}
    alike |= {"loss_scale_steps": 1024, "gradient_inspect": False, "save_param_to_cpu": True}
    alike |= dict.fromkeys(("world_size", "local_size", "zero_size", "tp_zero_size"), 2)
    alike |= dict.fromkeys(("rank", "local_rank", "zero_rank", "tp_zero_rank"), bmt_core.rank())
    found = {key: value for key, value in config.items() if isinstance(value, int)}
    assert found == {**alike, "finish_save": True}


def sizes_of_groups() -> tuple[int, ...]:
    keys = ("pipe_enabled", "pipe_size", "tp_size", "zero_size", "tp_zero_size")
    return tuple(config[key] for key in keys)


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ({}, (False, 1, 1, 4, 4)),
        ({"pipe_size": 1}, (True, 1, 1, 4, 4)),
        ({"pipe_size": 2}, (True, 2, 1, 2, 2)),
        ({"tp_size": 2}, (False, 1, 2, 4, 2)),
        ({"pipe_size": 2, "tp_size": 2}, (True, 2, 2, 2, 1)),
        ({"pipe_size": 4}, (True, 4, 1, 1, 1)),
    ],
)
def test_sizes_are_bmtrains_under_every_grid(
    init: dict[str, int], expected: tuple[int, ...]
) -> None:
    for package in ("bmt_pipeline", "bmt_tp"):
        pytest.importorskip(package)
    assert run_ranks(sizes_of_groups, 4, init=init) == [expected] * 4


def saved_meanwhile(directory: Path) -> list[bool]:
    model, found = torch.nn.Linear(2, 2), [config["finish_save"]]
    bmt_checkpoint.save(model, directory / "a.pt", non_blocking=True)
    bmt_checkpoint.wait_for_saves()
    found.append(config.finish_save)
    may_go_on = Event()
    bmt_checkpoint.background.start_save("a save that waits", may_go_on.wait)
    found.append(config.finish_save)
    may_go_on.set()
    bmt_checkpoint.wait_for_saves()
    return [*found, config.finish_save]


def test_finish_save_says_whether_a_save_is_under_way(tmp_path: Path) -> None:
    assert run_ranks(saved_meanwhile, 1, tmp_path) == [[True, True, False, True]]


def assigned() -> None:
    stream = config.load_stream
    config["load_stream"] = config["calc_stream"]
    config.rank = config.rank  # nothing new: no warning
    assert config.load_stream is config["calc_stream"] is not stream
    config["micros"] = 6
    assert config.micros == bmt_core.current().settings.num_micro_batches == 6
    with pytest.warns(
        UserWarning, match=r"config\['zero_size'\] was assigned.*the run itself goes on with 1"
    ):
        config.zero_size = 4
    assert config["zero_size"] == 4
    with pytest.raises(bmt_core.ConfigError, match="num_micro_batches must be at least 1"):
        config["micros"] = 0
    config["num_micro_batches"] = 4
    assert config.micros == config.num_micro_batches == 4
    config["zero_level"] = 2
    assert config.zero_level == bmt_core.current().settings.zero_level == 2
    with pytest.raises(bmt_core.ConfigError, match="zero_level must be one of"):
        config["zero_level"] = 7
    for key, value, instead in (
        ("loss_scale_factor", 4, r"OptimManager\(loss_scale_factor=...\)"),
        ("loss_scale_steps", 8, r"OptimManager\(loss_scale_steps=...\)"),
        ("gradient_inspect", True, r"bmt.inspect.inspect_model"),
        ("save_param_to_cpu", False, "bmt.save gathers one tensor at a time"),
        ("finish_save", False, r"bmt.wait_for_saves\(\)"),
    ):
        with pytest.warns(UserWarning, match=rf"config\['{key}'\] was assigned.*{instead}"):
            config[key] = value
    with pytest.raises(KeyError, match="No config key is named 'zero_levle'"):
        config["zero_levle"] = 3
    with pytest.raises(AttributeError, match="No config key is named 'wrold_size'"):
        config.wrold_size = 2
    with pytest.raises(TypeError, match="cannot be deleted"):
        del config["rank"]


def test_known_keys_are_assigned_until_the_run_ends() -> None:
    run_ranks(assigned, 1, own_run=True)
    run_ranks(not_assigned, 1)


def not_assigned() -> None:
    assert config["zero_size"] == 1 and config.micros == 1


@on_ranks(1, 4)
def test_config_answers_every_key_and_single_groups_for_missing_axes(world_size: int) -> None:
    comms = [
        "comm",
        "zero_comm",
        "tp_comm",
        "tp_zero_comm",
        "pipe_comm",
        "pp_zero_comm",
        "pp_tp_zero_comm",
    ]
    with pytest.raises(AttributeError, match="No config key is named 'wrold_size'"):
        config.wrold_size
    config["calc_stream"].wait_stream(config.load_stream)
    for name in ("tp_comm_stream", "pp_comm_stream", "barrier_stream", "load_stream"):
        config[name].synchronize()
    config.load_event.record()
    assert isinstance(config.topology, Topology) and config["tp_size"] == 1
    assert set(config) >= {"initialized", "rank", "topology", *comms}
    everyone, alone = tuple(range(world_size)), (config.rank,)
    assert config.rank == bmt_core.rank()
    for name in comms:
        assert config[name].ranks == (alone if name in ("tp_comm", "pipe_comm") else everyone)


def test_config_before_init_has_the_answers_of_one_rank_and_an_error_for_the_rest() -> None:
    assert dict(config) == {"initialized": False, "rank": 0, "world_size": 1}
    assert config.initialized is False and len(config) == 3
    with pytest.raises(RuntimeError, match="not initialised"):
        config["topology"]


def test_config_is_one_object_under_both_names() -> None:
    assert bmtrain.config is config and bmtrain.global_var is global_var
