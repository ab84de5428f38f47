"""Files of ``torch.save`` with tensors and plain values only, which is checked at writing and
at reading.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from bmt_checkpoint.memory_pieces import pieces
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_core.errors import CheckpointError, cause_of

_CHUNK = 1 << 24


def write_torch_file(path: Path, value: object) -> None:
    """Write ``value`` so that :func:`read_torch_file` can read it. :class:`CheckpointError` or
    OSError if that fails.
    """
    try:
        with _FileThatRemembersErrors(path, "w") as file:
            try:
                torch.save(value, file)
            except RuntimeError as error:  # how torch reports any error of the file
                raise file.error or CheckpointError(f"Cannot write {path}: {error}.") from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{_ONLY_PLAIN} {error}") from error
    # A file that cannot be loaded must be noticed now, not when it is needed. This does not read
    # the tensors' values.
    try:
        torch.load(path, mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{_ONLY_PLAIN} Torch refuses {_refused(error)}.") from error


class _FileThatRemembersErrors(io.FileIO):
    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            for piece in pieces(data):
                while piece:  # a full disk may take a part
                    piece = piece[super().write(piece) :]
        except OSError as error:
            self.error = self.error or error
            raise
        return memoryview(data).nbytes


def read_torch_file(path: Path) -> Any:
    """Return the contents of ``path``. Tensors are mapped from the file, so they take no memory
    until they are read.

    Raises :class:`CheckpointError` if there is no such file, if it is damaged or was not written by
    torch, and if it holds anything but tensors and plain values (torch's ``weights_only``).
    """
    if not path.is_file():
        what = "It is a directory: " if path.is_dir() else ""
        raise CheckpointError(f"There is no checkpoint file {path}. {what}{lies_there(path)}")
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _verify_checksums(path)
        # Files that torch wrote before 1.6 are not archives and cannot be mapped.
        return torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except (CheckpointError, MemoryError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    except pickle.UnpicklingError as error:
        if is_archive:
            raise CheckpointError(
                f"{path} holds more than tensors and plain values: {_refused(error)}."
                " If you trust it, load it with torch.load(weights_only=False) and save the state"
                " dict alone."
            ) from error
        raise CheckpointError(_not_whole(path)) from error
    # torch may raise anything for arbitrary bytes.
    except Exception as error:
        raise CheckpointError(f"{_not_whole(path)} ({cause_of(error)})") from error


def archive_checksum(path: Path) -> str | None:
    """Return a checksum of the checksums, sizes and names in a file of ``torch.save``; None if
    there is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(info.filename, info.CRC, info.file_size) for info in archive.infolist()]
    except (OSError, zipfile.BadZipFile, ValueError):
        return None
    return f"{zlib.crc32(repr(records).encode()):08x}"


_ONLY_PLAIN = (
    "A checkpoint can hold tensors and plain values (numbers, texts, lists, tuples, dicts), and"
    " something else was given, as a module's extra state, in the optimizer's state, or in extra=."
)


def _not_whole(path: Path) -> str:
    return (
        f"{path} is not a whole file of torch.save: it was cut short, is damaged, or was written by"
        " something else. Use another checkpoint, or copy it again."
    )


def _verify_checksums(path: Path) -> None:
    # torch writes checksums and does not verify them. Zero means that writing them was turned off.
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.CRC == 0:
                continue
            with archive.open(info) as record:
                while record.read(_CHUNK):
                    pass


def _refused(error: pickle.UnpicklingError) -> str:
    # The name of the class is in the middle of a long text about torch.load's arguments.
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else str(error).strip().splitlines()[-1]
