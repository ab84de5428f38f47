"""The safetensors format: files that Hugging Face's libraries read, written and read one tensor at
a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bmt_checkpoint.format import CheckpointFormat, CheckpointReader
from bmt_checkpoint.memory_pieces import bytes_of, pieces
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_checkpoint.safetensors_layout import (
    CHECKSUMS,
    TORCH_DTYPES,
    FileLayout,
    check_entries,
    header_is_whole,
    read_header,
    state_in,
)
from bmt_core.errors import CheckpointError, cause_of
from bmt_params.state.index import Index, TensorEntry


class SafetensorsFormat(CheckpointFormat):
    """Files for ``safetensors.torch.load_file``. Tied tensors are stored once, under the first
    name, as Hugging Face does.
    """

    name = "safetensors"
    suffixes = (".safetensors",)

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        layout = FileLayout(index)
        checksums = {}
        with path.open("wb") as file:
            file.seek(layout.data_start)
            for name, tensor in tensors:
                check_entries({}, {name: tensor})
                file.seek(layout.offset_of(name))
                checksums[name] = 0
                for piece in pieces(bytes_of(tensor)):
                    checksums[name] = zlib.crc32(piece, checksums[name])
                    file.write(piece)
                    del piece
                del tensor  # before the next one is made
            file.seek(0)
            file.write(layout.header(checksums))
        _Reader(path).close()  # a file that cannot be loaded must be noticed now

    def open(self, path: Path) -> CheckpointReader:
        return _Reader(path)


class _Reader(CheckpointReader):
    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"There is no checkpoint file {path}. {lies_there(path)}")
        self._path = path
        with _as_checkpoint_error(path):
            status = path.stat()
            self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            self._file = _opened(path)
            self._metadata: dict[str, str] = self._file.metadata() or {}
            entries = {name: self._entry(name) for name in self._file.keys()}  # noqa: SIM118
        self._names = sorted(entries)
        self._checksums = self._metadata.get(CHECKSUMS, "")
        if self._checksums and not header_is_whole(read_header(path), self._checksums):
            raise CheckpointError(f"{_not_whole(path)} Its header has another checksum.")
        with _as_checkpoint_error(path):
            extra, versions = state_in(self._metadata)
        for name, source in self._metadata.items():
            if source in entries and name not in entries and (name, source) != ("format", "pt"):
                entries[name] = TensorEntry(
                    shape=entries[source].shape, dtype=entries[source].dtype, source=source
                )
        self.index = Index(entries={**entries, **extra}, metadata=versions)

    def _entry(self, name: str) -> TensorEntry:
        # From the header: the library (0.8) keeps two integers of each tensor that it makes.
        in_header = self._file.get_slice(name)
        shape, dtype = in_header.get_shape(), TORCH_DTYPES.get(in_header.get_dtype())
        if dtype is None:  # several elements in a byte, where torch counts bytes
            tensor = self.read(name)
            shape, dtype = tensor.shape, tensor.dtype
        return TensorEntry(shape=torch.Size(shape), dtype=dtype, source=name)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def verify(self, part: int, parts: int) -> None:
        if not self._checksums:  # written by another program
            return
        for i in range(part, len(self._names), parts):
            if (
                f"{zlib.crc32(bytes_of(self.read(self._names[i]))):08x}"
                != self._checksums[8 * i + 8 : 8 * i + 16]
            ):
                raise CheckpointError(
                    f"{_not_whole(self._path)} The values of {self._names[i]} have"
                    " another checksum."
                )

    def close(self) -> None:
        self._file.__exit__(None, None, None)


def _opened(path: Path) -> Any:  # the library has no types
    return safe_open(path, framework="pt", device="cpu")


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    # The library has errors of its own, and arbitrary bytes lead to others.
    except Exception as error:
        raise CheckpointError(f"{_not_whole(path)} ({cause_of(error)})") from error


def _not_whole(path: Path) -> str:
    return (
        f"{path} is not a whole safetensors file: it was cut short, is damaged, or was written by"
        " something else. Use another checkpoint, or copy it again."
    )
