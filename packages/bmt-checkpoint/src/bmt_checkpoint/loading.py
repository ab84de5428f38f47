"""``load``: read a whole model from a file and give every rank its part, one tensor at a time."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.adapters import has_adapters_of, load_adapters
from bmt_checkpoint.background import finish_last_save
from bmt_checkpoint.format import CheckpointReader
from bmt_checkpoint.format_choice import FormatChoice
from bmt_checkpoint.hub_names import Shapes, converted_index, shapes_of
from bmt_checkpoint.plan import LoadPlan, Step, plan_load
from bmt_checkpoint.shared_reader import opened_by_all
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.run.runtime import current, is_initialized, world_group
from bmt_core.torch_internals import LoadResult, counting_versions, load_hooks
from bmt_params.parameter_holders import group_of_owners, in_one_order
from bmt_params.state.index import TensorEntry
from bmt_params.state.model_tensors import named_targets, write_whole
from bmt_params.uninitialized import off_meta_device


@explain_keywords(
    path="file_name", map_location="Every rank loads its parts to the device of the model."
)
@counting_versions()
def load(
    model: nn.Module,
    file_name: str | os.PathLike[str],
    strict: bool = True,
    *,
    format: FormatChoice = None,
) -> Any:
    """Read ``file_name``, written by any number of ranks in any grid, into ``model``. Collective.

    ``file_name`` is a file in a format that bmt knows (torch's, safetensors), or a directory in the
    layout of Hugging Face or of ``torch.distributed.checkpoint``. Every rank keeps its part of each
    tensor, in the model's dtype. Ranks may hold different parts of the model, as pipeline stages
    do. If all ranks see the same safetensors files, each reads its part of every tensor (the files
    are mapped, so only the pages that it copies are read); otherwise rank 0, which alone needs
    access to them, reads one tensor at a time and broadcasts it. Names, shapes, dtypes and
    checksums are compared before anything is written: if they do not fit, or if a file is damaged
    or not a checkpoint, every rank raises :class:`CheckpointError` and the model is unchanged.
    Modules' ``load_state_dict`` pre-hooks and overrides of ``_load_from_state_dict`` may rename and
    add keys; that they compute with tensors is such an error, too. A model of transformers is
    loaded from the hub's names and layouts (old names, experts one by one) by transformers' own
    rules, one group of tensors at a time: a rank then reads whole groups. Of a directory with
    adapters, those of a model of PEFT are read.

    With ``strict`` False, keys that only the file or only the model has are ignored. Returns
    torch's named tuple ``(missing_keys, unexpected_keys)``.
    """
    finish_last_save(f"loading {file_name}")
    if has_adapters_of(model, Path(file_name)):
        return load_adapters(model, Path(file_name), strict=strict)
    with prepared_load(
        model, Path(file_name), strict=strict, format=format, is_hub=True
    ) as load_model:
        return load_model()


@contextmanager
def prepared_load(
    model: nn.Module,
    source: Path,
    *,
    strict: bool = True,
    format: FormatChoice = None,
    is_hub: bool = False,
) -> Iterator[Callable[[], Any]]:
    """Compare ``model`` with the file ``source``, and yield the function that loads it, which
    returns what :func:`load` does.

    The ``with`` statement and the function are collective. If the file does not load, every rank
    raises before the body. With ``is_hub`` the file may have the names of Hugging Face's hub.
    """
    group = world_group()
    what = f"loading {source}"
    with off_meta_device(), opened_by_all(source, what, format) as shared:
        owners = group_of_owners(model.parameters())
        elsewhere = set().union(
            *all_gather_object([name for name, _, _ in named_targets(model)], owners)
        )
        shapes: Shapes = (
            dict(ChainMap(*all_gather_object(shapes_of(model), owners))) if is_hub else {}
        )
        note_rules = None
        with collective_section(group, what):
            if is_hub and (hub := converted_index(model, shapes, shared.index)) is not None:
                shared = replace(shared, index=hub.index, reader=hub.opened(shared.reader))
                note_rules = hub.note_rules
            index = shared.index
            plan = plan_load(model, index, source=str(source), strict=strict, elsewhere=elsewhere)
        wanted = in_one_order(all_gather_object(plan.sources, owners))
        shared.verify()

        def load_model() -> Any:
            with no_way_back(what), collective_section(group, what):
                if shared.all_read:
                    _read_own_parts(plan, shared.reader)
                else:
                    _receive(plan, [index.entries[name] for name in wanted], shared.reader, group)
            with no_way_back(what), collective_section(group, what):
                if note_rules is not None:
                    note_rules()
                return _tell_modules(model, plan)

        yield load_model


@contextmanager
def no_way_back(what: str, changed: str = "the model is") -> Iterator[None]:
    """Raise an error of the body as :class:`CheckpointError` that says what was loaded in part.
    Communicates nothing.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} was interrupted, and {changed} loaded in part ({type(error).__name__}:"
            f" {error}). Load a whole checkpoint before you go on, or stop."
        ) from error


def _tell_modules(model: nn.Module, plan: LoadPlan) -> Any:
    """Give modules their extra state, and call the hooks that torch calls after a load; return the
    keys that did not match.
    """
    for module, value in plan.extra_states:
        module.set_extra_state(value)
    incompatible = LoadResult(plan.missing, plan.unexpected)
    for module in model.modules():
        for hook in load_hooks(module)[1].values():
            hook(module, incompatible)
    return incompatible


def _read_own_parts(plan: LoadPlan, reader: CheckpointReader | None) -> None:
    """Execute the steps of ``plan`` with what this rank reads by itself. Communicates nothing."""
    assert reader is not None
    for step in plan.steps:
        value = step.value
        if isinstance(value, TensorEntry):
            value = reader.read(value.source)
            if step.target is None:  # the module will keep it, and the file is closed
                value = value.to(_device(), copy=True)
        _execute(step, value, plan)


def _receive(
    plan: LoadPlan, wanted: Sequence[TensorEntry], reader: CheckpointReader | None, group: Group
) -> None:
    """Execute the steps of ``plan``. All ranks pass the same ``wanted``: the tensors of the file
    that any rank needs.
    """
    waiting: dict[str, list[Step]] = {}
    for step in plan.steps:
        if isinstance(step.value, TensorEntry):
            waiting.setdefault(step.value.source, []).append(step)
        else:
            _execute(step, step.value, plan)
    failure: Exception | None = None
    for entry in wanted:
        try:
            whole = None if reader is None else reader.read(entry.source).to(_device())
        except Exception as error:
            # The other ranks wait for this tensor and the following ones: go on broadcasting,
            # without values.
            failure, whole = failure or error, None
        whole = _broadcast(entry, whole, group)
        for step in waiting.get(entry.source, ()):
            if failure is None:
                _execute(step, whole, plan)
        del whole  # before the next one is made
    if failure is not None:
        raise failure


def _execute(step: Step, whole: Any, plan: LoadPlan) -> None:
    if step.target is None:
        plan.extra_states.append((step.module, whole))
    else:
        write_whole(step.target, whole)


def _broadcast(entry: TensorEntry, whole: torch.Tensor | None, group: Group) -> torch.Tensor:
    if whole is None:
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=_device())
    if whole.numel():
        group.broadcast(whole, 0).wait()
    return whole


def _device() -> torch.device:
    return current().device if is_initialized() else torch.device("cpu")
