"""``load``: a whole model from a file into the parts of any number of ranks, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from bmt_core.checkpoint.background import wait_for_saves
from bmt_core.checkpoint.choice import FormatChoice, choose_format
from bmt_core.checkpoint.format import CheckpointReader, ForeignEntry, Index, TensorEntry
from bmt_core.checkpoint.model_state import named_targets, world_group, write_whole
from bmt_core.checkpoint.plan import LoadPlan, Step, plan_load
from bmt_core.checkpoint.torch_file import packed, unpacked
from bmt_core.comm.objects import all_gather_object, broadcast_object, together
from bmt_core.comm.protocols import Group
from bmt_core.params.own_parameters import group_of_owners, in_one_order
from bmt_core.params.uninitialized import off_meta_device
from bmt_core.run.runtime import current, is_initialized


def load(model: nn.Module, path: str | os.PathLike[str], strict: bool = True, *, format: FormatChoice = None) -> Any:
    """Read ``path`` into ``model``, whatever number of ranks and grid wrote it. Collective.

    Rank 0 reads one tensor at a time and sends it; every rank keeps its part, in the dtype that the model has. Ranks may
    hold different parts of the model, as pipeline stages do. Only rank 0 needs to see the file. Names, shapes and dtypes
    are compared before anything is written: if they do not fit, or the file is cut short, damaged or of another kind,
    every rank raises :class:`CheckpointError` and the model is unchanged.

    With ``strict`` False keys that only the file or only the model has are left out, as torch does. Returns torch's
    named tuple ``(missing_keys, unexpected_keys)``.
    """
    with off_meta_device():
        return _load(model, Path(path), strict, format)


def _load(model: nn.Module, source: Path, strict: bool, format: FormatChoice) -> Any:
    wait_for_saves()
    group = world_group()
    reader: CheckpointReader | None = None
    try:
        with together(group, f"loading {source}"):
            if group.rank == 0:
                reader = choose_format(source, format).open(source)
        index = _index_of(reader, group)
        owners = group_of_owners(model.parameters())
        elsewhere = set().union(*all_gather_object([name for name, _, _ in named_targets(model)], owners))
        with together(group, f"loading {source}"):
            plan = plan_load(model, index, source=str(source), strict=strict, elsewhere=elsewhere)
        wanted = in_one_order(all_gather_object(plan.sources, owners))
        _receive(plan, [index.entries[name] for name in wanted], reader, group)
    finally:
        if reader is not None:
            reader.close()
    with together(group, f"loading {source}"):
        for module, value in plan.extra_states:
            module.set_extra_state(value)
        incompatible = _IncompatibleKeys(plan.missing, plan.unexpected)
        for module in model.modules():
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, incompatible)
    return incompatible


def _index_of(reader: CheckpointReader | None, group: Group) -> Index:
    message = None
    if reader is not None:
        entries = reader.index.entries
        extra = {name: value for name, value in entries.items() if not isinstance(value, (TensorEntry, ForeignEntry))}
        # An extra state may hold tensors of any dtype, of which pickle does not know all.
        message = {**entries, **dict.fromkeys(extra)}, packed(extra), dict(reader.index.metadata)
    entries, packed_extra, metadata = broadcast_object(message, group)
    return Index(entries={**entries, **unpacked(packed_extra)}, metadata=metadata)


def _receive(plan: LoadPlan, wanted: Sequence[TensorEntry], reader: CheckpointReader | None, group: Group) -> None:
    """Take the steps of ``plan``. ``wanted`` is what any rank needs of the file, in one order: all take part in sending it."""
    waiting: dict[str, list[Step]] = {}
    for step in plan.steps:
        if isinstance(step.value, TensorEntry):
            waiting.setdefault(step.value.source, []).append(step)
        else:
            _take(step, step.value, plan)
    for entry in wanted:
        whole = _sent(entry, reader, group)
        for step in waiting.get(entry.source, ()):
            _take(step, whole, plan)
        del whole  # before the next one is made


def _take(step: Step, whole: Any, plan: LoadPlan) -> None:
    if step.target is None:
        plan.extra_states.append((step.module, whole))
    else:
        write_whole(step.target, whole)


def _sent(entry: TensorEntry, reader: CheckpointReader | None, group: Group) -> torch.Tensor:
    device = current().device if is_initialized() else torch.device("cpu")
    if reader is not None:
        whole = reader.read(entry.source).to(device)
    else:
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if whole.numel():
        group.broadcast(whole, 0).wait()
    return whole
