"""``save``: write a whole model to one file, gathering one tensor at a time, or to a directory,
each rank its parts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.adapters import has_adapters, save_adapters
from bmt_checkpoint.atomic import replacing, replacing_directory
from bmt_checkpoint.background import capture_result, group_of_writers, join_last_save, start_save
from bmt_checkpoint.directory_writer import DirectorySave
from bmt_checkpoint.format import CheckpointFormat
from bmt_checkpoint.format_choice import FormatChoice, choose_directory_format, choose_format
from bmt_checkpoint.hub_state import hub_files, hub_state
from bmt_checkpoint.safetensors_format import SafetensorsFormat
from bmt_checkpoint.safetensors_layout import check_entries
from bmt_checkpoint.snapshot import snapshot
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import CheckpointError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.run.runtime import world_group
from bmt_params.models_of_run import tell_of_save
from bmt_params.state.index import Index
from bmt_params.state.whole_state import LocalState, WholeState


@explain_keywords(
    path="file_name",
    optimizer="save_checkpoint(dir, model, manager) saves the optimizers of an OptimManager.",
    safe_serialization="A file_name that ends in .safetensors is written in that format.",
)
def save(
    model: nn.Module,
    file_name: str | os.PathLike[str],
    non_blocking: bool = False,
    *,
    format: FormatChoice = None,
    tokenizer: Any = None,
) -> None:
    """Write the state dict of ``model`` to ``file_name``, as whole tensors under the names of the
    plain model. Collective.

    In the torch format, which is the default, the file is what ``torch.save(model.state_dict())``
    of the unwrapped model writes: ``torch.load(file_name, weights_only=True)`` reads it, and the
    unwrapped model's ``load_state_dict`` accepts it. A ``file_name`` that ends in ``.safetensors``
    is written in that format. If it is a directory, or ends in a slash, all ranks write safetensors
    files in it, and rank 0 the index that Hugging Face's ``from_pretrained`` reads; all ranks must
    share that directory, on a file system on which several machines may write to parts of one file.
    A ``file_name`` that ends in ``.dcp`` is a directory for ``torch.distributed.checkpoint``. Tied
    parameters are stored once. If ranks hold different parts of the model, as pipeline stages do,
    the checkpoint has all parts. A tensor that is not distributed (a buffer or a plain parameter)
    is taken from the first rank that has it. Modules are saved by their hooks and
    ``_save_to_state_dict``; a ``state_dict`` that a module overrides is not called, because
    libraries call ``save`` in it.

    A directory of a model of transformers is what its ``save_pretrained`` writes: the names and
    layouts of the hub, which transformers' own rules make, ``config.json`` and
    ``generation_config.json``; and the files of ``tokenizer`` (or of a processor, or of whatever
    has ``save_pretrained(directory)``), if it is given. Every other file has the names of the
    plain model. A directory of a model of PEFT is what PEFT's ``save_pretrained`` writes: the
    adapters, without the frozen model, and at once, also with ``non_blocking``. If transformers'
    ``model.add_adapter`` has put adapters into a model, a directory has the names of that model,
    which :func:`load` reads into another one like it, and ``from_pretrained`` does not.

    To a directory every rank writes its own parts, and nothing is gathered, except tensors that the
    hub stores in another layout (experts one by one), one group on each rank at a time. For a file,
    one tensor is gathered at a time, and only rank 0 holds them in host memory: all of them in the
    torch format, one in the safetensors format. The write is atomic: if the program dies at any
    moment, the previous checkpoint is still there. With ``non_blocking`` each rank copies its parts
    to the host now and writes them on a thread; if that fails, the next ``save``, ``load`` or
    :func:`wait_for_saves` raises the error. Memory for the copies for a directory (pinned, if they
    come from a GPU) is kept for the next such save until ``shutdown()``: reusing memory is several
    times as fast as allocating it.

    ``format`` is the name of a registered format or a :class:`CheckpointFormat`; by default the
    file's suffix decides. Raises :class:`CheckpointError` on every rank when a rank cannot write.
    """
    target = Path(file_name)
    what = f"saving {target}"
    group = world_group()
    tell_of_save(model)
    with collective_section(group, what) as results:
        join_last_save()
        chosen, is_directory = _choose(
            target, str(file_name).endswith("/") or target.is_dir(), format
        )
        local = LocalState.of_model(model, is_snapshot=non_blocking)
        if is_directory:
            check_entries(local.entries, local.values)
        elif tokenizer is not None and group.rank == 0:
            raise CheckpointError(
                f"{target} is a file, and a tokenizer is saved in a directory: end the name in"
                " a slash."
            )
        beside = hub_files(model, tokenizer) if is_directory and group.rank == 0 else {}
        results.own = is_directory, local.layout.summary
    are_directories, summaries = zip(*results.of_ranks, strict=True)
    if are_directories[0] and has_adapters(model):
        save_adapters(model, target, tokenizer)
        return
    state = WholeState(local, what, summaries)
    if are_directories[0]:  # rank 0 decides: ranks that share no disk may see different files
        # What the rules make of the index, an error too, is the same on every rank.
        _save_directory(
            DirectorySave(target, hub_state(state, model), what, beside), what, non_blocking
        )
    else:
        save_file(state, target, what, chosen, non_blocking=non_blocking)


def _choose(
    target: Path, is_directory: bool, choice: FormatChoice
) -> tuple[CheckpointFormat, bool]:
    """Return the format, and whether all ranks write files of it to the directory ``target``."""
    chosen = choose_directory_format(target) if choice is None else None
    chosen = chosen or choose_format(
        target / "model.safetensors" if is_directory else target, choice
    )
    is_directory = is_directory and not chosen.is_directory
    if is_directory and not isinstance(chosen, SafetensorsFormat):
        raise CheckpointError(
            f"{target} is a directory, which holds safetensors. For the format {chosen.name!r},"
            " name a file."
        )
    return chosen, is_directory


def save_file(
    state: WholeState,
    target: Path,
    what: str,
    chosen: CheckpointFormat,
    *,
    non_blocking: bool = False,
) -> None:
    """Gather ``state`` on rank 0, which writes it to ``target`` in the format ``chosen``.
    Collective.
    """
    group = world_group()
    with collective_section(group, what):
        index, tensors = state.index, state.tensors(keep=group.rank == 0)
        try:
            if group.rank == 0 and non_blocking:
                copies = list(tensors)
                start_save(what, lambda: write_checkpoint(target, chosen, index, copies))
            elif group.rank == 0:
                write_checkpoint(target, chosen, index, tensors)
        finally:
            # Gathers are collective: other ranks than 0, and a rank 0 whose disk is full, make them
            # all too.
            deque(tensors, maxlen=0)


def _save_directory(save: DirectorySave, what: str, non_blocking: bool) -> None:
    if non_blocking:
        group, copies = group_of_writers(), capture_result(lambda: snapshot(save.parts()))
        start_save(what, lambda: save.write(copies, group))
    else:
        save.write(save.batches, world_group())


def write_checkpoint(
    target: Path,
    chosen: CheckpointFormat,
    index: Index,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write a file, or the directory that the format makes of it, on this rank, atomically."""
    with replacing_directory(target) if chosen.is_directory else replacing(target) as temporary:
        chosen.write(temporary, index, tensors)
