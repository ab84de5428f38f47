"""The ranks that compute the layers of one model together: the tensor-parallel group of this rank."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import Runtime, current

AXIS = "tp"


class TensorRanks(NamedTuple):
    """The tensor-parallel group, the lane in which activations travel beside the products, and the group of that lane."""

    group: Group
    lane: Lane
    in_lane: Group


def tensor_ranks() -> TensorRanks:
    """Return those of the current run. Every product asks for them, so they are looked up once."""
    runtime = current()
    found = _of_runs.get(runtime)
    if found is None:
        group, lane = tensor_group(), runtime.lanes.named(AXIS)
        found = _of_runs[runtime] = TensorRanks(group, lane, lane.group(group))
    return found


def tensor_group() -> Group:
    """Return the group of ranks along ``tp``; of this rank alone with ``tp_size=1``."""
    return current().topology.group((AXIS,))


def tensor_size() -> int:
    """Number of ranks along ``tp``."""
    return current().topology.axis_size(AXIS)


def own_share(total: int, what: str) -> int:
    """Return ``total / tp_size``, or raise :class:`ConfigError` if it is no whole number."""
    size = tensor_size()
    if total % size:
        raise ConfigError(
            f"{what} is {total}, which tp_size={size} does not divide. Choose a multiple of {size}, or another tp_size."
        )
    return total // size


_of_runs: weakref.WeakKeyDictionary[Runtime, TensorRanks] = weakref.WeakKeyDictionary()
