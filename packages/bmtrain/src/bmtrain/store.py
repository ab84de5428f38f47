"""BMTrain's ``store``: checkpoints, whole state dicts on rank 0, and Python objects
between ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from bmt_checkpoint import load, save
from bmt_core import current, is_initialized
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.objects import broadcast_object as _broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import world_group
from bmt_params.models_of_run import tell_of_save
from bmt_params.modules.layer_list import LayerList
from bmt_params.state.index import TensorEntry
from bmt_params.state.whole_state import LocalState, WholeState

__all__ = [
    "_save_to_infer_model",
    "_save_to_local_rank0",
    "_save_to_rank0",
    "allgather_objects",
    "broadcast_object",
    "load",
    "save",
]


def _save_to_rank0(
    model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Put the state dict of ``model``, as whole tensors on the host, into ``destination`` on
    rank 0. Collective.

    Returns ``destination``, by default a new dictionary; on other ranks it is unchanged. ``prefix``
    is put before names.
    """
    return _save_to(world_group().rank == 0, model, destination, prefix)


def _save_to_local_rank0(
    model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Like :func:`_save_to_rank0`, on the first rank of every host. Collective."""
    return _save_to(_is_first_of_host(), model, destination, prefix)


def _save_to_infer_model(
    model: nn.Module, infer_model: Any, destination: dict[str, Any] | None = None, prefix: str = ""
) -> None:
    """Give the first rank of every host the state dict of ``model``, in its ``infer_model``.
    Collective.

    Calls ``infer_model.load_layer_state_dict(state)`` with the state of each layer of a
    ``TransformerBlockList``, and last with all else, added to ``destination``. At first the whole
    state dict is in host memory; a layer's tensors leave it after their call.
    """
    state = _save_to_local_rank0(model, None, prefix)
    if not _is_first_of_host():
        return
    lists = [(name, child) for name, child in model.named_modules() if isinstance(child, LayerList)]
    layers = [f"{prefix}{name}.{number}." for name, child in lists for number in child._modules]
    for layer in layers:
        names = [name for name in state if name.startswith(layer)]
        infer_model.load_layer_state_dict(OrderedDict((name, state.pop(name)) for name in names))
    infer_model.load_layer_state_dict(state if destination is None else {**destination, **state})


def _is_first_of_host() -> bool:
    return not is_initialized() or current().launch.local_rank == 0


def _save_to(
    is_wanted: bool, model: nn.Module, destination: dict[str, Any] | None, prefix: str
) -> dict[str, Any]:
    """Put the state of ``model`` into ``destination`` on ranks where ``is_wanted`` is True.
    Collective.
    """
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    group, what = world_group(), "saving to the memory of ranks"
    tell_of_save(model)
    with collective_section(group, what) as results:
        local = LocalState.of_model(model)
        results.own = local.layout.summary
    state = WholeState(local, what, results.of_ranks)
    with collective_section(group, what):
        by_name = dict(state.tensors(keep=group.rank == 0))
    if any(all_gather_object(is_wanted, group)[1:]):
        for name, entry in state.index.entries.items():
            if isinstance(entry, TensorEntry) and entry.source == name:
                whole = _from_rank_0(by_name.get(name), entry, group)
                if is_wanted:
                    by_name[name] = whole
    if is_wanted:
        for name, entry in state.index.entries.items():
            result[prefix + name] = (
                by_name[entry.source] if isinstance(entry, TensorEntry) else entry
            )
    return result


def _from_rank_0(tensor: torch.Tensor | None, entry: TensorEntry, group: Group) -> torch.Tensor:
    """Return rank 0's host ``tensor`` in the host memory of every rank. Collective."""
    device = current().device
    sent = (
        torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if tensor is None
        else tensor.to(device)
    )
    if sent.numel():
        group.broadcast(sent, 0).wait()
    return sent.cpu()


def broadcast_object(obj: object, comm: Group, src: int = 0) -> Any:
    """Return the ``obj`` of the group's rank ``src`` on every rank. Collective."""
    return _broadcast_object(obj, comm, src)


def allgather_objects(obj: object) -> list[Any]:
    """Return the ``obj`` of every rank, in rank order. Collective."""
    return all_gather_object(obj, world_group())
