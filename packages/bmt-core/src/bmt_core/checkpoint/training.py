"""``save_checkpoint`` and ``load_checkpoint``: the whole state of a training, from which it continues bit for bit.

A checkpoint is a directory ``step-N`` with ``model.pt`` (see :func:`save`) and ``training.pt``. A file ``latest`` beside it
names the newest one. A checkpoint is written under another name and renamed when it is complete, so that ``latest`` always
names a complete one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bmt_core.checkpoint.atomic import cannot_write, previous_of, publish_directory, replacing
from bmt_core.checkpoint.background import wait_for_saves
from bmt_core.checkpoint.loading import prepared_load
from bmt_core.checkpoint.manager_state import LOGICAL, NONE, PER_RANK, kind_of, prepare_manager, rank_file
from bmt_core.checkpoint.model_state import world_group
from bmt_core.checkpoint.random_state import check_random_states, random_states, restore_random_states
from bmt_core.checkpoint.saving import save
from bmt_core.checkpoint.torch_file import from_bytes, read_torch_file, to_bytes, write_torch_file
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError

_MODEL = "model.pt"
_TRAINING = "training.pt"
_LATEST = "latest"


def save_checkpoint(
    dir: str | os.PathLike[str], model: nn.Module, manager: Any = None, *, step: int = 0, extra: Any = None
) -> Path:
    """Write all that is needed to continue bit for bit to ``dir/step-<step>`` and return that path. Collective.

    That is: the model; the optimizers, loss scale and schedulers of ``manager``; the state of every rank's random
    generators (torch, its CUDA device, ``random``, numpy); ``step``; and rank 0's ``extra``, made of tensors and plain values,
    for example the position in the data. ``manager`` is any object with ``state_dict()`` and ``load_state_dict()``. If it has
    ``logical_state()`` and ``load_logical_state()``, as ``OptimManager`` has, its state is stored whole and can be loaded by
    any number of ranks. Otherwise each rank writes its own state, to a directory that all ranks must be able to access.

    If the program dies at any moment, the checkpoint that ``dir/latest`` names is complete.
    """
    if step < 0:
        raise ValueError(f"step is the number of steps taken, 0 or more, not {step}.")
    wait_for_saves()
    group = world_group()
    final = Path(dir) / f"step-{step}"
    temporary = final.with_name(f"{final.name}.tmp")
    with collective_section(group, f"saving {final}"):
        if group.rank == 0:
            _make_empty(temporary)
    try:
        _write_checkpoint(temporary, model, manager, step, extra)
        with collective_section(group, f"saving {final}"):
            if group.rank == 0:
                _publish(temporary, final)
    except BaseException:
        if group.rank == 0:  # on a full disk, what was written would be in the way
            shutil.rmtree(temporary, ignore_errors=True)
        raise
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
            folder = _find_checkpoint(folder)
            training = _read_training(folder)
    head_bytes = to_bytes({name: training[name] for name in _HEAD}) if training is not None else None
    head_bytes, folder = broadcast_object((head_bytes, folder), group)
    head = from_bytes(head_bytes)
    with collective_section(group, f"loading {folder}"):
        check_random_states(head["random"], head["world_size"])
    state = None if training is None else training["optimizer_state"]
    # Nothing is changed before every rank has found everything in order.
    with prepared_load(model, folder / _MODEL) as load_model:
        load_manager = prepare_manager(manager, model, folder, head, state)
        load_model()
    load_manager()
    _restore_random(head["random"], folder, group)
    return {"step": head["step"], "extra": head["extra"]}


_HEAD = ("step", "extra", "world_size", "random", "optimizer")


def _write_checkpoint(folder: Path, model: nn.Module, manager: Any, step: int, extra: Any) -> None:
    group = world_group()
    save(model, folder / _MODEL)
    kind = kind_of(manager)
    state = manager.logical_state(list(model.named_parameters())) if kind == LOGICAL else None
    states = all_gather_object(random_states(), group)
    with collective_section(group, f"saving {folder}"):
        if kind == PER_RANK:
            _write(folder / rank_file(group.rank), manager.state_dict())
        if group.rank == 0:
            training = {"step": step, "extra": extra, "world_size": group.size, "random": states}
            _write(folder / _TRAINING, {**training, "optimizer": kind, "optimizer_state": state})


def _make_empty(folder: Path) -> None:
    try:
        if folder.exists():  # left by a program that died
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error


def _write(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        write_torch_file(temporary, value)


def _publish(temporary: Path, final: Path) -> None:
    try:
        publish_directory(temporary, final)
    except OSError as error:
        raise CheckpointError(cannot_write(final, error)) from error
    with replacing(final.parent / _LATEST) as latest:
        latest.write_text(f"{final.name}\n")


def _find_checkpoint(folder: Path) -> Path:
    named = _named_by_latest(folder) or folder
    # The second exists if the program died in publish_directory.
    for candidate in (named, previous_of(named)):
        if (candidate / _TRAINING).is_file():
            return candidate
    raise CheckpointError(
        f"There is no checkpoint in {folder}: neither a file 'latest' beside a directory that it names, nor a file {_TRAINING}."
        " Name the directory that was given to save_checkpoint(), or one step-N in it."
    )


def _named_by_latest(folder: Path) -> Path | None:
    """Return the directory that the file ``latest`` in ``folder`` names; None if there is no such file."""
    path = folder / _LATEST
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(200)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    name = content.decode(errors="replace").strip()
    if re.fullmatch(r"step-[0-9]{1,40}", name) is None:
        raise CheckpointError(
            f"{path} holds {content[:40]!r}, not the name of a checkpoint beside it, such as 'step-100'. Name the checkpoint itself"
            f" ({folder / 'step-N'}), or write its name to that file."
        )
    return folder / name


def _read_training(folder: Path) -> dict[str, Any]:
    path = folder / _TRAINING
    training = read_torch_file(path)
    if not isinstance(training, dict) or not {*_HEAD, "optimizer_state"} <= training.keys():
        raise CheckpointError(f"{path} was not written by save_checkpoint().")
    fits = {
        "step": isinstance(training["step"], int),
        "world_size": isinstance(training["world_size"], int),
        "optimizer": isinstance(kind := training["optimizer"], str) and kind in (NONE, LOGICAL, PER_RANK),
        "optimizer_state": (training["optimizer_state"] is None) == (kind != LOGICAL),
    }
    wrong = [f"{name} = {str(training[name])[:40]!r}" for name, is_right in fits.items() if not is_right]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)}. Use another checkpoint.")
    return training


def _restore_random(saved: Sequence[dict[str, Any]], folder: Path, group: Group) -> None:
    seeded = restore_random_states(saved, group.rank, group.size)
    if seeded and group.rank == 0:
        print(
            f"bmt: {folder} was saved by {len(saved)} rank(s) and is loaded by {group.size}: the random generators that differed"
            f" between ranks ({', '.join(seeded)}) are seeded anew, from rank 0's state and the rank.",
            flush=True,
        )
