"""BMTrain's ``config``: the state of the current run, by key or by attribute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from bmt_core import Runtime, current, is_initialized, rank, world_size
from bmt_core.user_warnings import warn_user
from bmtrain._old_names import add_old_names
from bmtrain._streams import EVENTS, STREAMS, stream_or_event

__all__ = ["ConfigMap", "RunConfig", "config", "rank", "world_size"]


def _assigned_values(runtime: Runtime) -> dict[str, Any]:
    return {}


class RunConfig(MutableMapping[str, Any]):
    """A view of the current run.

    A known key may be assigned in a run; reading it then returns the assigned value until the run
    ends. Two have an effect: ``micros``, or ``num_micro_batches``, is the number of micro-batches,
    and ``zero_level`` that of the Blocks that are made later without one. bmt does not read the
    other keys, and assigning another value than the run's warns.

    Groups that a run does not have, such as ``tp_comm`` with tp_size 1, are groups of one rank.
    Before ``init_distributed()`` there are only the keys ``initialized`` (False), ``rank`` (0) and
    ``world_size`` (1).
    """

    def __getitem__(self, key: str) -> Any:
        if key not in _VALUES:
            raise KeyError(f"No config key is named {key!r}. Known: {', '.join(_VALUES)}.")
        if key in _BEFORE_INIT and not is_initialized():
            return _BEFORE_INIT[key]
        assigned = current().state(_assigned_values)
        return assigned[key] if key in assigned else _VALUES[key](current())

    def __setitem__(self, key: str, value: Any) -> None:
        before, run = self[key], current()
        if key in _SETTINGS:
            run.settings = replace(run.settings, **{_SETTINGS[key]: value})
            return
        if value is not before and value != before and key not in (*STREAMS, *EVENTS):
            warn_user(
                f"config[{key!r}] was assigned: reading it returns that value, but the run itself"
                f" goes on with {before!r}."
                f" {_INSTEAD.get(key, 'Pass it to init_distributed() instead.')}"
            )
        run.state(_assigned_values)[key] = value

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            self[name] = value
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __delitem__(self, key: str) -> NoReturn:
        raise TypeError("Keys of config cannot be deleted: they describe the run.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __iter__(self) -> Iterator[str]:
        return iter(_VALUES if is_initialized() else _BEFORE_INIT)

    def __len__(self) -> int:
        return len(_VALUES if is_initialized() else _BEFORE_INIT)


def _is_saving() -> bool:
    """Whether this rank writes a checkpoint in the background, which none does that has not
    imported bmt-checkpoint.
    """
    background = sys.modules.get("bmt_checkpoint.background")
    return background is not None and bool(background.is_saving())


# Key -> the setting of the run that an assignment changes.
_SETTINGS = {
    "micros": "num_micro_batches",
    "num_micro_batches": "num_micro_batches",
    "zero_level": "zero_level",
}
_INSTEAD = {
    "finish_save": "bmt.wait_for_saves() waits for a save under way.",
    "gradient_inspect": "bmt.inspect.inspect_model(model, '*') describes gradients after backward.",
    "loss_scale_factor": "Pass it to OptimManager(loss_scale_factor=...) instead.",
    "loss_scale_steps": "Pass it to OptimManager(loss_scale_steps=...) instead.",
    "save_param_to_cpu": "bmt.save gathers one tensor at a time, in host memory.",
}
_BEFORE_INIT = {"initialized": False, "rank": 0, "world_size": 1}
_VALUES: dict[str, Callable[[Runtime], Any]] = {
    "initialized": lambda run: True,
    "rank": lambda run: run.rank,
    "local_rank": lambda run: run.launch.local_rank,
    "world_size": lambda run: run.world_size,
    "local_size": lambda run: run.launch.local_world_size,
    "pipe_size": lambda run: run.topology.axis_size("pp"),
    "pipe_enabled": lambda run: run.settings.pipe_enabled,
    "tp_size": lambda run: run.topology.axis_size("tp"),
    "zero_size": lambda run: run.world_size // run.topology.axis_size("pp"),
    "tp_zero_size": lambda run: (
        run.world_size // (run.topology.axis_size("pp") * run.topology.axis_size("tp"))
    ),
    "zero_level": lambda run: run.settings.zero_level,
    "zero_rank": attrgetter("topology.zero_id"),
    "tp_rank": attrgetter("topology.tp_id"),
    "tp_zero_rank": attrgetter("topology.tp_zero_id"),
    "topology": lambda run: run.topology,
    **dict.fromkeys(
        ("micros", "num_micro_batches"),
        lambda run: run.settings.num_micro_batches or run.topology.axis_size("pp"),
    ),
    "loss_scale_factor": lambda run: 2,  # what OptimManager has by default, as BMTrain
    "loss_scale_steps": lambda run: 1024,
    "gradient_inspect": lambda run: False,
    "save_param_to_cpu": lambda run: True,
    "finish_save": lambda run: not _is_saving(),
    "comm": lambda run: run.world,
    "zero_comm": lambda run: run.world,
    "tp_comm": lambda run: run.topology.group(("tp",)),
    "tp_zero_comm": lambda run: run.topology.shard_group(("tp",)),
    "pipe_comm": lambda run: run.topology.group(("pp",)),
    "pp_zero_comm": lambda run: run.topology.shard_group(("pp",)),
    "pp_tp_zero_comm": lambda run: run.topology.shard_group(("pp", "tp")),
    **{name: partial(stream_or_event, name=name) for name in (*STREAMS, *EVENTS)},
}
config = RunConfig()
add_old_names()

ConfigMap = RunConfig  # BMTrain's name
