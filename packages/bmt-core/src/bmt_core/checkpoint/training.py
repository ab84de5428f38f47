"""``save_checkpoint`` and ``load_checkpoint``: the whole state of a training, from which it continues bit for bit.

A checkpoint is a directory ``step-N`` with ``model.pt`` (see :func:`save`) and ``training.pt``. A file ``latest`` beside it
names the newest one. A checkpoint is written under another name and renamed when it is complete, so that ``latest`` always
names a complete one.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from bmt_core.checkpoint.atomic import replacing
from bmt_core.checkpoint.background import start_save, wait_for_saves
from bmt_core.checkpoint.loading import prepared_load
from bmt_core.checkpoint.manager_state import LOGICAL, PER_RANK, kind_of, prepare_manager, rank_file
from bmt_core.checkpoint.model_state import world_group
from bmt_core.checkpoint.random_state import check_random_states, random_states, restore_random_states
from bmt_core.checkpoint.saving import host_copy, save, write_file
from bmt_core.checkpoint.torch_file import archive_checksum, from_bytes, to_bytes, write_torch_file
from bmt_core.checkpoint.torch_format import TorchFormat
from bmt_core.checkpoint.training_folder import (
    HEAD,
    MODEL,
    TRAINING,
    find_checkpoint,
    make_empty,
    publish,
    read_training,
)
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group


def save_checkpoint(
    dir: str | os.PathLike[str],
    model: nn.Module,
    manager: Any = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int | None = None,
    non_blocking: bool = False,
) -> Path:
    """Write all that is needed to continue bit for bit to ``dir/step-<step>`` and return that path. Collective.

    That is: the model; the optimizers, loss scale and schedulers of ``manager``; the state of every rank's random
    generators (torch, its CUDA device, ``random``, numpy); ``step``; and rank 0's ``extra``, made of tensors and plain values,
    for example the position in the data. ``manager`` is any object with ``state_dict()`` and ``load_state_dict()``. If it has
    ``logical_state()`` and ``load_logical_state()``, as ``OptimManager`` has, its state is stored whole and can be loaded by
    any number of ranks. Otherwise each rank writes its own state, to a directory that all ranks must be able to access.

    If the program dies at any moment, the checkpoint that ``dir/latest`` names is complete. When the new one is, all but
    ``keep`` are deleted: it, and those of the highest steps.

    With ``non_blocking`` rank 0 copies all to its host memory now and writes on a thread; what each rank writes itself is
    written now. The next save or load, or :func:`wait_for_saves`, waits for it and raises an error that happens there.
    """
    if step < 0:
        raise ValueError(f"step is the number of steps taken, 0 or more, not {step}.")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is the number of checkpoints to keep, 1 or more, not {keep}.")
    wait_for_saves()
    group = world_group()
    final = Path(dir) / f"step-{step}"
    temporary = final.with_name(f"{final.name}.tmp")
    what = f"saving {final}"
    with collective_section(group, what):
        if group.rank == 0:
            make_empty(temporary)
    with _removed_on_failure(temporary):
        copies = host_copy(model, what) if non_blocking else None
        if copies is None:
            save(model, temporary / MODEL)
        training = _training_state(temporary, model, manager, step, extra)

        def complete() -> None:
            with _removed_on_failure(temporary):
                if copies is not None:
                    write_file(temporary / MODEL, TorchFormat(), *copies)
                training["files"][MODEL] = archive_checksum(temporary / MODEL)
                _write(temporary / TRAINING, training)
                publish(temporary, final, keep)

        with collective_section(group, what):
            if group.rank == 0 and non_blocking:
                training = copy.deepcopy(training)  # the program goes on and changes what it gave
                start_save(what, complete)
            elif group.rank == 0:
                complete()
    return final


def load_checkpoint(dir: str | os.PathLike[str], model: nn.Module, manager: Any = None) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote and return ``{"step": …, "extra": …}``. Collective.

    ``dir`` is the directory given to :func:`save_checkpoint`, whose latest checkpoint is loaded, or one ``step-N`` in it.
    With ``manager`` None the optimizer's state is not loaded. The number of ranks may differ from the one at saving if the
    optimizer's state is stored whole. Random generators whose states differed between ranks are then seeded from rank 0's
    state and the rank, and a line is printed that says so.

    Raises :class:`CheckpointError` on every rank. If the files are damaged or do not fit the model, nothing has been changed.
    """
    wait_for_saves()
    group = world_group()
    training: dict[str, Any] | None = None
    folder = Path(dir)
    with collective_section(group, f"loading {folder}"):
        if group.rank == 0:
            folder = find_checkpoint(folder)
            training = read_training(folder)
    head_bytes = to_bytes({name: training[name] for name in HEAD}) if training is not None else None
    head_bytes, folder = broadcast_object((head_bytes, folder), group)
    head = from_bytes(head_bytes)
    with collective_section(group, f"loading {folder}"):
        check_random_states(head["random"], head["world_size"])
    state = None if training is None else training["optimizer_state"]
    # Nothing is changed before every rank has found everything in order.
    with prepared_load(model, folder / MODEL) as load_model:
        load_manager = prepare_manager(manager, model, folder, head, state)
        load_model()
    load_manager()
    _restore_random(head["random"], folder, group)
    return {"step": head["step"], "extra": head["extra"]}


def _training_state(folder: Path, model: nn.Module, manager: Any, step: int, extra: Any) -> dict[str, Any]:
    """Return what rank 0 writes to ``training.pt``, after each rank has written what it writes itself. Collective."""
    group, kind = world_group(), kind_of(manager)
    state = manager.logical_state(list(model.named_parameters())) if kind == LOGICAL else None
    own_file = None
    with collective_section(group, f"saving {folder}"):
        if kind == PER_RANK:
            path = folder / rank_file(group.rank)
            _write(path, manager.state_dict())
            own_file = path.name, archive_checksum(path)
    files = dict(file for file in all_gather_object(own_file, group) if file is not None)
    return {
        "step": step,
        "extra": extra,
        "world_size": group.size,
        "random": all_gather_object(random_states(), group),
        "optimizer": kind,
        "optimizer_state": state,
        "files": files,
    }


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if world_group().rank == 0:  # on a full disk, what was written would be in the way
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        write_torch_file(temporary, value)


def _restore_random(saved: Sequence[dict[str, Any]], folder: Path, group: Group) -> None:
    seeded = restore_random_states(saved, group.rank, group.size)
    if seeded and group.rank == 0:
        print(
            f"bmt: {folder} was saved by {len(saved)} rank(s) and is loaded by {group.size}: the random generators that differed"
            f" between ranks ({', '.join(seeded)}) are seeded anew, from rank 0's state and the rank.",
            flush=True,
        )
