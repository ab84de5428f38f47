"""``save_checkpoint`` and ``load_checkpoint``: the whole state of a training, from which it
continues bit for bit.

A checkpoint is a directory ``step-N``: ``model`` and ``optimizer`` are directories of safetensors
that all ranks write (:mod:`bmt_checkpoint.directory_writer`), or files of a format that was chosen;
``training.pt`` has all else, and checksums of the other files. A file ``latest`` beside it names
the newest one. A checkpoint is written under another name and renamed when it is complete, so that
``latest`` always names a complete one (or, for a moment, its former version as ``step-N.old``,
which a load finds). :mod:`bmt_checkpoint.training_folder` shows the directory.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.atomic import replacing
from bmt_checkpoint.background import (
    capture_result,
    finish_last_save,
    group_of_writers,
    join_last_save,
    start_save,
)
from bmt_checkpoint.directory_reader import INDEX_FILE
from bmt_checkpoint.directory_writer import DirectorySave
from bmt_checkpoint.format import CheckpointFormat
from bmt_checkpoint.format_choice import FormatChoice, choose_format
from bmt_checkpoint.loading import prepared_load
from bmt_checkpoint.manager_state import (
    LOGICAL,
    OPTIMIZER,
    PER_RANK,
    kind_of,
    prepared_manager,
    rank_file,
)
from bmt_checkpoint.random_state import (
    check_random_states,
    data_rank_and_grid,
    random_states,
    restore_random_states,
)
from bmt_checkpoint.run_directory_lock import lock_run_directory
from bmt_checkpoint.safetensors_layout import check_entries
from bmt_checkpoint.saving import save_file, write_checkpoint
from bmt_checkpoint.snapshot import snapshot
from bmt_checkpoint.torch_file import write_torch_file
from bmt_checkpoint.training_folder import (
    HEAD,
    MODEL,
    TRAINING,
    UNFINISHED,
    file_checksum,
    find_checkpoint,
    format_of,
    make_empty,
    part_of,
    publish,
    read_training,
    refuse_file,
    unfinished_after,
)
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.run.runtime import world_group
from bmt_core.torch_internals import counting_versions
from bmt_params.models_of_run import tell_of_save
from bmt_params.state.serialization import from_bytes, to_bytes
from bmt_params.state.state_tensors import parts_in, with_references
from bmt_params.state.whole_state import LocalState, OwnPart, WholeState

_OF_MANAGER = (
    "Hand it to an OptimManager: manager.add_optimizer(optimizer, lr_scheduler); and pass the"
    " manager."
)
_OF_OTHERS = {
    "lr_scheduler": _OF_MANAGER,
    "optimizer": _OF_MANAGER,
    "path": "dir",
    "scheduler": _OF_MANAGER,
}


@explain_keywords(**_OF_OTHERS, max_to_keep="keep", save_total_limit="keep")
def save_checkpoint(
    dir: str | os.PathLike[str],
    model: nn.Module,
    manager: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    non_blocking: bool = False,
    format: FormatChoice = None,
) -> Path:
    """Write a checkpoint, from which training continues bit for bit, to ``dir/step-<step>``; return
    that path. ``step`` is the number of steps taken; without it every save replaces ``dir/step-0``.
    Collective.

    It holds the model; the optimizers, loss scale and schedulers of ``manager``; the state of every
    rank's random generators (torch, its CUDA device, ``random``, numpy); ``step``; and rank 0's
    ``extra``, made of tensors and plain values, for example the position in the data. ``manager``
    is any object with ``state_dict()`` and ``load_state_dict()``; each rank writes its own state
    dict. If it has ``logical_state(named_parameters)`` and
    ``load_logical_state(named_parameters, state)``, as ``OptimManager`` has, any number of ranks
    can load the state. A logical state is made of nested dicts and lists: plain values and whole
    tensors in it are written by rank 0; for a tensor that all ranks write, like the model's, each
    rank returns a :class:`TensorPart`. Where no tensor was written so, or ranks do not see the same
    files, ``load_logical_state`` gets the state on rank 0 and None on the others. A manager that
    also has ``check_logical_state(named_parameters, state)``, which raises without changing
    anything, is loaded once and not twice.

    All ranks write their own parts to a directory that they share, and nothing is gathered. If the
    program dies at any moment, the checkpoint that ``dir/latest`` names is complete. When the new
    one is complete, all but ``keep`` checkpoints are deleted: the new one and those of the highest
    steps stay.

    With ``non_blocking`` each rank copies its parts now (from a GPU to pinned memory), and a thread
    writes while training goes on. The next save or load, or :func:`wait_for_saves`, waits for the
    thread and raises its error. The memory of the copies, as many bytes as the rank's parts of
    model and optimizer have, is kept for the next such save until ``shutdown()``.

    ``format`` None: directories of safetensors that all ranks write. The name of a registered
    format (also ``"safetensors"``) or a :class:`CheckpointFormat`: one file or directory for the
    model and one for the optimizer's tensors, written by rank 0, for which tensors are gathered one
    by one; with ``non_blocking`` rank 0 holds them all until they are written. Its name is stored,
    so that :func:`load_checkpoint` finds it among the registered ones.

    One run at a time saves to ``dir``: from its first save until ``shutdown()``, rank 0 holds a
    lock on the file ``dir/.written-by``. The lock of a process that died is free.
    :func:`lock_checkpoints` takes it earlier.

    Raises :class:`CheckpointError` on every rank when a rank cannot write, or another run saves to
    ``dir``; that error names its process and host.
    """
    _check_numbers(step, keep)
    step = step or 0
    final = Path(dir) / f"step-{step}"
    temporary = _unfinished(final)
    what = f"saving {final}"
    tell_of_save(model)
    with ExitStack() as stack:
        with collective_section(world_group(), what) as results:
            join_last_save()
            refuse_file(final.parent)
            if world_group().rank == 0:
                lock_run_directory(final.parent)
            # After join_last_save() and the lock: no other save writes there now.
            stack.enter_context(_removed_on_failure(temporary))
            chosen = None if format is None else choose_format(final, format)
            of_model = LocalState.of_model(model, is_snapshot=non_blocking)
            if chosen is None:
                check_entries(of_model.entries, of_model.values)
            results.own = of_model.layout.summary, None if chosen is None else chosen.name
            if world_group().rank == 0:
                make_empty(temporary)
        summaries, formats = zip(*results.of_ranks, strict=True)
        if len(set(formats)) > 1:  # the same on every rank
            raise ConfigError(
                f"Ranks save {final} in different formats: {formats}. Pass the same format on"
                " every rank."
            )
        states = {MODEL: WholeState(of_model, what, summaries)}
        training, of_optimizer = _training_state(temporary, model, manager, step, extra, chosen)
        if of_optimizer is not None:
            states[OPTIMIZER] = of_optimizer
        if chosen is not None:
            _save_in_format(states, chosen, training, final, keep, non_blocking=non_blocking)
            return final
        group = group_of_writers() if non_blocking else world_group()
    saves = [DirectorySave(temporary / name, state, what) for name, state in states.items()]
    write = partial(_write_directory, saves, what, group, final, keep)
    if non_blocking:
        # Copies, because training goes on and changes these objects.
        copies = capture_result(
            lambda: (snapshot(*(save.parts() for save in saves)), copy.deepcopy(training))
        )
        copied = [partial(_copied_parts, copies, number) for number in range(len(saves))]
        start_save(what, lambda: write(copied, lambda: copies()[1]))
    else:
        write([save.batches for save in saves], lambda: training)
    return final


@explain_keywords(**_OF_OTHERS)
@counting_versions()
def load_checkpoint(
    dir: str | os.PathLike[str],
    model: nn.Module,
    manager: Any = None,
    *,
    format: FormatChoice = None,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote and return ``{"step": …, "extra": …}``.
    Collective.

    ``dir`` is the directory given to :func:`save_checkpoint`, whose latest checkpoint is loaded, or
    one ``step-N`` in it. With ``manager`` None the optimizer's state is not loaded. ``format`` is
    needed only for files of a format that no plugin announces. The number of ranks may differ from
    the one at saving if the optimizer's state is stored whole. Random generators that differed
    between ranks may then be seeded anew (see :func:`restore_random_states`), and rank 0 prints a
    line that says so.

    Raises :class:`CheckpointError` on every rank. If the files are damaged or do not fit the model,
    nothing has been changed.
    """
    folder = Path(dir)
    finish_last_save(f"loading {folder}")
    group = world_group()
    training: dict[str, Any] | None = None
    with collective_section(group, f"loading {folder}"):
        if group.rank == 0:
            folder = find_checkpoint(folder)
            training = read_training(folder)
            for path in unfinished_after(folder):
                print(
                    f"bmt: the save {path} did not finish; {folder.name}, the newest that did,"
                    " is loaded.",
                    flush=True,
                )
    head_bytes = (
        to_bytes({name: training.get(name) for name in (*HEAD, "format")})
        if training is not None
        else None
    )
    head_bytes, folder = broadcast_object((head_bytes, folder), group)
    head = from_bytes(head_bytes)
    with collective_section(group, f"loading {folder}"):
        check_random_states(head["random"], head["places"], head["world_size"])
        chosen = format_of(head) if format is None else choose_format(folder, format)
        if chosen is not None and chosen.name != head["format"]:
            raise CheckpointError(
                f"{folder} was saved in {head['format'] or 'directories of safetensors'}, and"
                f" format={chosen.name!r} asks for another one. Leave format out."
            )
    state = None if training is None else training["optimizer_state"]
    # Nothing is changed before every rank has found everything in order.
    with (
        prepared_load(model, part_of(folder, MODEL, chosen), format=chosen) as load_model,
        prepared_manager(
            manager,
            model,
            folder,
            head,
            state,
            tensors=part_of(folder, OPTIMIZER, chosen),
            format=chosen,
        ) as load_manager,
    ):
        load_model()
        load_manager()
    _restore_random(head, folder, group)
    return {"step": head["step"], "extra": head["extra"]}


def _training_state(
    folder: Path,
    model: nn.Module,
    manager: Any,
    step: int,
    extra: Any,
    chosen: CheckpointFormat | None,
) -> tuple[dict[str, Any], WholeState | None]:
    """Write the manager's state of this rank to ``folder``, if it has one for each rank.
    Collective.

    Return the content of ``training.pt``, and the optimizer's tensors (None if no rank has any).
    """
    group, kind = world_group(), kind_of(manager)
    state = manager.logical_state(list(model.named_parameters())) if kind == LOGICAL else None
    what = f"saving {folder}"
    with collective_section(group, what) as results:
        files = {}
        if kind == PER_RANK:
            path = folder / rank_file(group.rank)
            _write(path, manager.state_dict())
            files = {path.name: file_checksum(path)}
        parts = LocalState.of_parts(parts_in(state))
        if chosen is None:
            check_entries(parts.entries)
        results.own = (
            files,
            bool(parts.values),
            random_states(),
            data_rank_and_grid(),
            parts.layout.summary,
        )
    files_of_ranks, has_parts, random, grids, summaries = zip(*results.of_ranks, strict=True)
    training = {
        "step": step,
        "extra": extra,
        "world_size": group.size,
        "random": list(random),
        "places": list(grids),
        "optimizer": kind,
        "format": None if chosen is None else chosen.name,
        "optimizer_state": with_references(state),
        "files": dict(ChainMap(*files_of_ranks)),
    }
    return training, WholeState(parts, what, summaries) if any(has_parts) else None


def _check_numbers(step: int | None, keep: int | None) -> None:
    # A load would not take the name that 5.0 gives a checkpoint, nor a tensor in training.pt.
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step is the number of steps taken, an int from 0 on, not {step!r}.")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(
            f"keep is the number of checkpoints to keep, an int from 1 on, not {keep!r}."
        )
    if keep is not None and step is None:
        raise ValueError(
            f"keep={keep} needs step: without it every checkpoint replaces the one before. Pass the"
            " number of steps taken, as step=."
        )


def _write_directory(
    saves: Sequence[DirectorySave],
    what: str,
    group: Group,
    final: Path,
    keep: int | None,
    batches: Sequence[Callable[[], Iterable[Sequence[OwnPart]]]],
    training: Callable[[], dict[str, Any]],
) -> None:
    """Write the parts of ``saves`` and ``training.pt``, and make the directory ``final`` of them.
    Collective. What is written comes from functions, so that an error of theirs is raised inside
    of a collective section.
    """
    temporary = _unfinished(final)
    with _removed_on_failure(temporary):
        for save, batches_of_save in zip(saves, batches, strict=True):
            save.write(batches_of_save, group)
        with collective_section(group, what):
            if group.rank == 0:
                content = training()
                content["files"].update(_index_checksums(temporary))
                _write(temporary / TRAINING, content)
                publish(temporary, final, keep)


def _save_in_format(
    states: Mapping[str, WholeState],
    chosen: CheckpointFormat,
    training: dict[str, Any],
    final: Path,
    keep: int | None,
    *,
    non_blocking: bool,
) -> None:
    """Let rank 0 write the whole ``states`` and then ``training.pt``, in the background on a thread
    of rank 0. Collective.
    """
    group, what, temporary = world_group(), f"saving {final}", _unfinished(final)
    targets = {name: part_of(temporary, name, chosen) for name in states}

    def finish() -> None:
        training["files"].update(
            {path.name: file_checksum(path) for path in targets.values() if path.is_file()}
        )
        _write(temporary / TRAINING, training)
        publish(temporary, final, keep)

    if not non_blocking:
        for name, state in states.items():
            save_file(state, targets[name], what, chosen)
        with collective_section(group, what):
            if group.rank == 0:
                finish()
        return
    copies: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, state in states.items():
        with collective_section(group, what):
            copies[name] = list(state.tensors(keep=group.rank == 0))
    with collective_section(group, what):
        training = copy.deepcopy(training)

    def write() -> None:
        with _removed_on_failure(temporary):
            for name, tensors in copies.items():
                write_checkpoint(targets[name], chosen, states[name].index, tensors)
            finish()

    if group.rank == 0:
        start_save(what, write)


def _copied_parts(
    copies: Callable[[], tuple[Sequence[Sequence[OwnPart]], Any]], number: int
) -> Iterator[Sequence[OwnPart]]:
    """Yield the parts of save ``number`` among ``copies()``."""
    yield copies()[0][number]


def _unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def _index_checksums(folder: Path) -> dict[str, str | None]:
    indices = sorted(path for path in folder.glob(f"*/{INDEX_FILE}"))
    return {str(path.relative_to(folder)): file_checksum(path) for path in indices}


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if world_group().rank == 0:  # the unfinished files would keep a full disk full
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        write_torch_file(temporary, value)


def _restore_random(head: Mapping[str, Any], folder: Path, group: Group) -> None:
    here = all_gather_object(data_rank_and_grid(), group)
    seeded = restore_random_states(head["random"], head["places"], group.rank, here)
    if seeded and group.rank == 0:
        print(
            f"bmt: {folder} was saved by {head['world_size']} rank(s) and is loaded by"
            f" {group.size}: the random generators that differed between ranks"
            f" ({', '.join(seeded)}) are seeded anew, from rank 0's state and each rank's"
            " data rank.",
            flush=True,
        )
