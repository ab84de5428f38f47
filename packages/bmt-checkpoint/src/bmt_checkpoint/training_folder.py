"""The directory of a training's checkpoints, and what makes one complete::

    latest                      the name of the newest complete checkpoint
    .written-by                 locked by the run that saves here
    step-N/training.pt          step, extra, random states, the optimizer's options, checksums
    step-N/model/               safetensors and their index; model.SUFFIX in a chosen format
    step-N/optimizer/           the same of the optimizer's tensors
    step-N/optimizer-rank-R.pt  in its place, for managers with a state for each rank
    step-N.tmp                  a save that has not finished
    step-N.old                  the former step-N, while the new one takes its name
    step-N.deleted              a checkpoint that is being deleted

The files in ``optimizer``, too, have Hugging Face's fixed names (``model-00001-of-...``). A save
writes the files of the model, its index, those of the optimizer, and last ``training.pt``; it
renames ``step-N.tmp`` and then replaces ``latest``. So a checkpoint that has its final name,
``training.pt`` and a model is complete.

All functions are for one rank, and communicate nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmt_checkpoint.atomic import cannot_write, previous_of, publish_directory, replacing
from bmt_checkpoint.directory_reader import INDEX_FILE, INDEX_SUFFIX
from bmt_checkpoint.format import CheckpointFormat
from bmt_checkpoint.format_choice import choose_format
from bmt_checkpoint.manager_state import LOGICAL, NONE, PER_RANK
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_checkpoint.torch_file import archive_checksum, read_torch_file
from bmt_core.errors import CheckpointError

MODEL, TRAINING = "model", "training.pt"
HEAD = ("step", "extra", "world_size", "random", "places", "optimizer")
"""The entries of ``training.pt`` that all ranks get; ``format`` too, which older files lack.

``places`` has what :func:`~bmt_checkpoint.random_state.data_rank_and_grid` returned on each rank.
"""
_LATEST = "latest"
_STEP = re.compile(r"step-([0-9]{1,40})")
_DELETED, UNFINISHED = ".deleted", ".tmp"


def latest(dir: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in ``dir`` that was saved last, for :func:`load_checkpoint`; None if
    there is none. Not collective.

    Raises :class:`CheckpointError` if ``dir`` is a file, and if that checkpoint is not complete;
    the error names the complete ones.
    """
    folder = Path(dir)
    refuse_file(folder)
    named = _named_by_latest(folder)
    return None if named is None else _complete(named) or _raise_incomplete(named)


def refuse_file(folder: Path) -> None:
    """Raise :class:`CheckpointError` if ``folder`` is a file, such as one of ``torch.save``."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, and the checkpoints of a training are in a directory, which"
            f" save_checkpoint() makes. Name another path. bmt.load(model, {str(folder)!r}) reads"
            " the weights of a file."
        )


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that was saved last in ``folder``, or ``folder`` itself if it
    is one.
    """
    found = latest(folder) or _complete(folder)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {folder}: neither a file 'latest' beside a directory that"
            f" it names, nor a file {TRAINING}. {lies_there(folder)} Name the directory that was"
            " given to save_checkpoint(), or one step-N in it."
        )
    return found


def unfinished_after(folder: Path) -> list[Path]:
    """Return the unfinished saves beside the checkpoint ``folder`` that are of later steps."""
    step = _STEP.fullmatch(folder.name)
    found = [
        (path, _STEP.fullmatch(path.stem)) for path in folder.parent.glob(f"step-*{UNFINISHED}")
    ]
    return sorted(path for path, match in found if step and match and int(match[1]) > int(step[1]))


def read_training(folder: Path) -> dict[str, Any]:
    """Return what ``training.pt`` holds, and compare the checksums of the files that it lists."""
    path = folder / TRAINING
    training = read_torch_file(path)
    if not isinstance(training, dict) or not {*HEAD, "optimizer_state", "files"} <= training.keys():
        raise CheckpointError(f"{path} was not written by save_checkpoint().")
    fits = {
        "step": isinstance(training["step"], int),
        "world_size": isinstance(training["world_size"], int),
        "optimizer": isinstance(kind := training["optimizer"], str)
        and kind in (NONE, LOGICAL, PER_RANK),
        "optimizer_state": (training["optimizer_state"] is None) == (kind != LOGICAL),
        "files": isinstance(training["files"], dict),
        "format": isinstance(training.get("format", ""), str | None),
    }
    wrong = [
        f"{name} = {str(training.get(name))[:40]!r}"
        for name, is_right in fits.items()
        if not is_right
    ]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)}. Use another checkpoint.")
    for name, checksum in training["files"].items():
        found = file_checksum(folder / str(name))
        # None: no such file, or no archive; reading it will raise.
        if found not in (None, checksum):
            raise CheckpointError(
                f"{folder / name} is not the file that was saved with {path.name}: it comes from"
                " another checkpoint. Copy the whole directory again."
            )
    return training


def format_of(training: Mapping[str, Any]) -> CheckpointFormat | None:
    """Return the format of the model and the optimizer's tensors; None for directories of
    safetensors, which all ranks write.
    """
    name = training.get("format")  # earlier versions had no other format
    return None if name is None else choose_format(Path(), name)


def part_of(folder: Path, name: str, form: CheckpointFormat | None) -> Path:
    """Return the file or directory ``name`` (model or optimizer) of the checkpoint ``folder`` in
    format ``form``.
    """
    return folder / (
        name if form is None else name + (form.suffixes[0] if form.suffixes else f".{form.name}")
    )


def file_checksum(path: Path) -> str | None:
    """Return a checksum of an index of safetensors files or of a file of ``torch.save``; None if it
    is neither.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return archive_checksum(path)
    return f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else None


def make_empty(folder: Path) -> None:
    """Create the empty directory ``folder``; delete what a program that died may have
    left there.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error


def publish(temporary: Path, final: Path, keep: int | None) -> None:
    """Rename ``temporary`` to ``final``, let ``latest`` name it, and delete unfinished saves and
    all but ``keep`` checkpoints.
    """
    try:
        publish_directory(temporary, final)
    except OSError as error:
        raise CheckpointError(cannot_write(final, error)) from error
    with replacing(final.parent / _LATEST) as path:
        path.write_text(f"{final.name}\n")
    for ending in (UNFINISHED, _DELETED):  # of programs that died
        for path in final.parent.glob(f"step-*{ending}"):
            shutil.rmtree(path, ignore_errors=True)
    if keep is not None:
        _delete([path for path in _steps(final.parent) if path != final][keep - 1 :])


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, the one of the highest step first."""
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _delete(paths: list[Path]) -> None:
    # Renamed first: if the program dies meanwhile, no partly deleted checkpoint keeps the name of a
    # whole one.
    for path in paths:
        doomed = path.with_name(path.name + _DELETED)
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(
                f"The new checkpoint is saved, and the old one {path} cannot be deleted: {error}."
            ) from error


def _named_by_latest(folder: Path) -> Path | None:
    """Return the directory that the file ``latest`` in ``folder`` names; None if there is no
    such file.
    """
    path = folder / _LATEST
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(200)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    name = content.decode(errors="replace").strip()
    if _STEP.fullmatch(name) is None:
        raise CheckpointError(
            f"{path} holds {content[:40]!r}, not the name of a checkpoint beside it, such as"
            f" 'step-100'. Name the checkpoint itself ({folder / 'step-N'}), or write its name to"
            " that file."
        )
    return folder / name


def _complete(folder: Path) -> Path | None:
    # The second candidate exists if the program died in publish_directory.
    candidates = (folder, previous_of(folder))
    return next(
        (path for path in candidates if (path / TRAINING).is_file() and _has_model(path)), None
    )


def _has_model(folder: Path) -> bool:
    return (folder / MODEL / INDEX_FILE).is_file() or any(folder.glob(f"{MODEL}.*"))


def _raise_incomplete(named: Path) -> Path:
    others = [path.name for path in _steps(named.parent) if _complete(path)]
    remedy = (
        f"To go on from an earlier one, name it: {', '.join(others)}."
        if others
        else "No other one is complete."
    )
    raise CheckpointError(
        f"The checkpoint that was saved last, {named}, is not there or lacks {TRAINING} or"
        f" {MODEL}. {lies_there(named)} {remedy}"
    )
