"""Files of ``torch.save`` that hold tensors and plain values only, checked when written and when read."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from bmt_core.errors import CheckpointError

_CHUNK = 1 << 24


def write_torch_file(path: Path, value: object) -> None:
    """Write ``value`` so that :func:`read_torch_file` can read it, or raise :class:`CheckpointError`."""
    try:
        torch.save(value, path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"Cannot write {path}: {error}.") from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{_ONLY_PLAIN} {error}") from error
    # What cannot be loaded must come out now, not after the crash: this reads the structure, not the tensors.
    try:
        torch.load(path, mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{_ONLY_PLAIN} Torch refuses {_refused(error)}.") from error


def read_torch_file(path: Path) -> Any:
    """Return what ``path`` holds, its tensors mapped from the file: they cost no memory before they are read.

    Raises :class:`CheckpointError` when there is no such file, when it is cut short or damaged, when torch did not
    write it, and when it holds anything but tensors and plain values (what torch calls ``weights_only``).
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint file {path}." + (" It is a directory." if path.is_dir() else ""))
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _check_sums(path)
        # Files older than torch 1.6 are no archives and cannot be mapped.
        return torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except (CheckpointError, MemoryError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    except pickle.UnpicklingError as error:
        if is_archive:
            raise CheckpointError(
                f"{path} holds other things than tensors and plain values: {_refused(error)}."
                " If you trust it, load it with torch.load(weights_only=False) and save the state dict alone."
            ) from error
        raise CheckpointError(_not_whole(path)) from error
    # Whatever the bytes are, torch's readers may raise whatever they like on them.
    except Exception as error:
        raise CheckpointError(f"{_not_whole(path)} ({type(error).__name__}: {_first_line(error)})") from error


def packed(value: object) -> bytes:
    """Return tensors and plain values as bytes: like pickle, and for every dtype."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what :func:`packed` was given."""
    return torch.load(io.BytesIO(data), weights_only=True)


_ONLY_PLAIN = (
    "A checkpoint can hold tensors and plain values (numbers, texts, lists, tuples, dicts), and something else was given,"
    " as a module's extra state, in the optimizer's state, or in extra=."
)


def _not_whole(path: Path) -> str:
    return (
        f"{path} is not a whole file of torch.save: it was cut short, is damaged, or was written by something else."
        " Use another checkpoint, or copy it again."
    )


def _check_sums(path: Path) -> None:
    # torch does not compare the sums that it writes. A sum of zero means that writing them was turned off.
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.CRC == 0:
                continue
            with archive.open(info) as record:
                while record.read(_CHUNK):
                    pass


def _refused(error: pickle.UnpicklingError) -> str:
    # The class stands in the middle of a long text about torch.load's arguments.
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else str(error).strip().splitlines()[-1]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
