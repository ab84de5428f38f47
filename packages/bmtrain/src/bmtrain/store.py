"""BMTrain's ``store``: checkpoints, whole state dicts on rank 0, and Python objects between ranks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from bmt_core.checkpoint import load, save
from bmt_core.checkpoint.format import TensorEntry
from bmt_core.checkpoint.whole_state import LocalState, WholeState, world_group
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.objects import broadcast_object as _broadcast_object
from bmt_core.comm.protocols import Group

__all__ = ["_save_to_rank0", "allgather_objects", "broadcast_object", "load", "save"]


def _save_to_rank0(model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """Put the state dict of ``model``, as whole tensors on the host, into ``destination`` on rank 0. Collective.

    Returns ``destination``, by default a new dictionary, which stays as it was on other ranks. Names get ``prefix``.
    """
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    group = world_group()
    state = WholeState(lambda: LocalState.of_model(model), "_save_to_rank0")
    with collective_section(group, "_save_to_rank0"):
        by_name = dict(state.tensors(keep=group.rank == 0))
    if group.rank == 0:
        for name, entry in state.index.entries.items():
            result[prefix + name] = by_name[entry.source] if isinstance(entry, TensorEntry) else entry
    return result


def broadcast_object(obj: object, comm: Group, src: int = 0) -> Any:
    """Return the ``obj`` of the group's rank ``src`` on every rank. Collective."""
    return _broadcast_object(obj, comm, src)


def allgather_objects(obj: object) -> list[Any]:
    """Return the ``obj`` of every rank, in rank order. Collective."""
    return all_gather_object(obj, world_group())
