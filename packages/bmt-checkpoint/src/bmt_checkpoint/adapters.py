"""Models of PEFT: a directory has what PEFT's ``save_pretrained`` writes, the adapters, and not the
frozen model below them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from bmt_checkpoint.atomic import replacing
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import world_group
from bmt_core.torch_internals import LoadResult
from bmt_params.state.index import TensorEntry
from bmt_params.state.model_tensors import named_targets, whole_shape, write_whole
from bmt_params.state.whole_state import LocalState, WholeState

FILE = "adapter_model.safetensors"


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a ``PeftModel``."""
    peft = sys.modules.get("peft")  # a program with such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """Return what PEFT saves of ``model`` and what is trained, by name: this rank's parts.
    Collective.
    """
    state = _tensors_of(model)
    saved = {
        id(tensor)
        for adapter in model.peft_config
        for tensor in _saved(model, state, adapter).values()
    }
    own = {name for name, tensor in state.items() if id(tensor) in saved or tensor.requires_grad}
    # PEFT may have asked the hub, which may answer one rank only.
    names = set().union(*all_gather_object(own, world_group()))
    return {name: tensor for name, tensor in state.items() if name in names}


@torch.no_grad()
def save_adapters(model: Any, directory: Path, tokenizer: Any = None) -> None:
    """Write the adapters as PEFT's ``save_pretrained`` does, and the files of ``tokenizer``, each
    file atomically. Collective; rank 0 holds the adapters whole for it.
    """
    group, what, own = world_group(), f"saving {directory}", adapter_state(model)
    with collective_section(group, what) as results:
        entries = {
            name: TensorEntry(shape=whole_shape(tensor), dtype=tensor.dtype, source=name)
            for name, tensor in own.items()
        }
        local = LocalState(entries, {}, own)
        results.own = local.layout.summary
    whole = WholeState(local, what, results.of_ranks)
    with collective_section(group, what):
        found = dict(whole.tensors(keep=group.rank == 0))
    with collective_section(group, what), tempfile.TemporaryDirectory() as folder:
        state = {**dict.fromkeys(own), **found}
        model.save_pretrained(folder, state_dict=state, is_main_process=group.rank == 0)
        if group.rank == 0:
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                with replacing(directory / path.relative_to(folder)) as temporary:
                    shutil.copyfile(path, temporary)


def has_adapters_of(model: nn.Module, directory: Path) -> bool:
    """Whether ``model`` is a ``PeftModel`` and ``directory`` has adapters, as rank 0 sees it.
    Collective for such a model.
    """
    return has_adapters(model) and broadcast_object((directory / FILE).is_file(), world_group())


@torch.no_grad()
def load_adapters(model: Any, directory: Path, *, strict: bool) -> LoadResult:
    """Read what :func:`save_adapters` or PEFT wrote into the adapters of these names. Collective;
    rank 0 alone needs the files, and each rank holds the adapters whole for it.

    With ``strict`` False, keys that only the file or only the model has are ignored, and returned.
    Otherwise, or if shapes differ, every rank raises :class:`CheckpointError`, and nothing has been
    changed.
    """
    group, what = world_group(), f"loading {directory}"
    read: dict[str, dict[str, torch.Tensor]] = {}
    with collective_section(group, what):
        for adapter in model.peft_config if group.rank == 0 else ():
            read[adapter] = load_file((directory / _folder(adapter)) / FILE)
    read = broadcast_object(read, group)
    state = _tensors_of(model)
    targets = {
        (adapter, name): target
        for adapter in read
        for name, target in _saved(model, state, adapter).items()
    }
    found = {(adapter, name): t for adapter, of_one in read.items() for name, t in of_one.items()}
    missing = [key[1] for key in targets if key not in found]
    everywhere = set().union(*all_gather_object(set(targets), group))
    unexpected = [key[1] for key in found if key not in everywhere]
    with collective_section(group, what):
        wrong = [
            f"{key[1]} has shape {tuple(found[key].shape)} in the file and"
            f" {tuple(whole_shape(target))} in the model"
            for key, target in targets.items()
            if key in found and found[key].shape != whole_shape(target)
        ]
        if strict:
            wrong += [f"{name} is not in the file" for name in missing]
            wrong += [f"{name} is not in the model" for name in unexpected]
        if wrong:
            raise CheckpointError(
                f"{directory} does not fit the model's adapters: {wrong[0]}"
                + (f", and {len(wrong) - 1} more" if wrong[1:] else "")
                + ". Make the model with the configuration that is there: adapter_config.json."
            )
    for key, target in targets.items():
        if key in found:
            write_whole(target, found[key])
    return LoadResult(missing, unexpected)


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, _, tensor in named_targets(model) if tensor is not None}


def _saved(model: Any, state: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    """Return those of the model's tensors that PEFT saves of ``adapter``, by their names in
    the file.
    """
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state, adapter_name=adapter)
    return found


def _folder(adapter: str) -> str:
    return "" if adapter == "default" else adapter  # PEFT's
