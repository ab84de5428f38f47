"""BMTrain's ``config``: the state of the current run, by key or by attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from bmt_core import Runtime, current, is_initialized, rank, world_size
from bmt_core.user_warnings import warn_user
from bmtrain._streams import EVENTS, STREAMS, stream_or_event

__all__ = ["ConfigMap", "RunConfig", "config", "rank", "world_size"]


class RunConfig(MutableMapping[str, Any]):
    """A view of the current run.

    A known key may be assigned in a run; reading it then returns the assigned value until the run ends. Only an assigned ``micros``
    has an effect: it is the number of micro-batches. bmt does not read the other keys, and assigning another value than the run's
    warns.

    Groups that a run does not have, such as ``tp_comm`` with tp_size 1, are groups of one rank. Before ``init_distributed()``
    there are only the keys ``initialized`` (False), ``rank`` (0) and ``world_size`` (1).
    """

    def __getitem__(self, key: str) -> Any:
        if key not in _VALUES:
            raise KeyError(f"No config key is named {key!r}. Known: {', '.join(_VALUES)}.")
        if key in _BEFORE_INIT and not is_initialized():
            return _BEFORE_INIT[key]
        assigned = _assigned.get(current(), {})
        return assigned[key] if key in assigned else _VALUES[key](current())

    def __setitem__(self, key: str, value: Any) -> None:
        before, run = self[key], current()
        if key == "micros":
            run.settings = replace(run.settings, num_micro_batches=value)
            return
        if value is not before and value != before and key not in (*STREAMS, *EVENTS):
            warn_user(
                f"config[{key!r}] was assigned: reading it returns that value, but the run itself goes on with {before!r}."
                " Pass it to init_distributed() instead."
            )
        _assigned.setdefault(run, {})[key] = value

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


_BEFORE_INIT = {"initialized": False, "rank": 0, "world_size": 1}
_VALUES: dict[str, Callable[[Runtime], Any]] = {
    "initialized": lambda run: True,
    "rank": lambda run: run.rank,
    "local_rank": lambda run: run.launch.local_rank,
    "world_size": lambda run: run.world_size,
    "local_size": lambda run: run.launch.local_world_size,
    "pipe_size": lambda run: run.topology.axis_size("pp"),
    "pipe_enabled": lambda run: run.topology.axis_size("pp") > 1,
    "tp_size": lambda run: run.topology.axis_size("tp"),
    "zero_size": lambda run: run.world_size,
    "tp_zero_size": lambda run: run.world_size // run.topology.axis_size("tp"),
    "zero_rank": lambda run: run.topology.zero_id,
    "tp_rank": lambda run: run.topology.tp_id,
    "tp_zero_rank": lambda run: run.topology.tp_zero_id,
    "topology": lambda run: run.topology,
    "micros": lambda run: run.settings.num_micro_batches or run.topology.axis_size("pp"),
    "comm": lambda run: run.world,
    "zero_comm": lambda run: run.world,
    "tp_comm": lambda run: run.topology.group(("tp",)),
    "tp_zero_comm": lambda run: run.topology.shard_group(("tp",)),
    "pipe_comm": lambda run: run.topology.group(("pp",)),
    "pp_zero_comm": lambda run: run.topology.shard_group(("pp",)),
    "pp_tp_zero_comm": lambda run: run.topology.shard_group(("pp", "tp")),
    **{name: partial(stream_or_event, name=name) for name in (*STREAMS, *EVENTS)},
}
_assigned: WeakKeyDictionary[Runtime, dict[str, Any]] = WeakKeyDictionary()
config = RunConfig()

ConfigMap = RunConfig  # BMTrain's name
