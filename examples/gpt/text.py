"""``Text``: the bytes to learn from and the bytes held out, from Python's own library or from
any files.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256
SEPARATOR = b"\0"  # stands between documents and in no document: a file that has it is not text

_HELD_OUT_SHARE = 0.05
# Installed packages, tests and tables of character codes are not Python's library as people write
# it; the build's settings differ between machines.
_SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")


@dataclass(frozen=True)
class Document:
    """One file, or a part of one. ``name`` is its path below the directory that was read."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Text:
    """Documents to train on and documents held out. No document, and no copy of one, is in both."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def fingerprint(self) -> int:
        """A number that differs, almost surely, when any byte does."""
        return zlib.crc32(_joined(self.held_out), zlib.crc32(_joined(self.training)))

    def training_bytes(self) -> torch.Tensor:
        """Return all training documents as one uint8 tensor, with a separator after each."""
        return torch.frombuffer(bytearray(_joined(self.training)), dtype=torch.uint8)

    def held_out_bytes(self) -> torch.Tensor:
        """Return all held-out documents as one uint8 tensor, with a separator after each."""
        return torch.frombuffer(bytearray(_joined(self.held_out)), dtype=torch.uint8)


def read_text(source: Path | None = None, max_bytes: int | None = None) -> Text:
    """Read a file, all text files below a directory, or by default the sources of Python's
    standard library.

    The order is that of a checksum of the names, so it looks random and is the same on every
    machine. The first 5 % of the bytes, in whole documents, are held out; of a single file, the
    last 5 %. ``max_bytes`` ends the reading.
    """
    documents = list(_documents(source, max_bytes))
    if len(documents) == 1:
        documents = _cut(documents[0])
    wanted = _HELD_OUT_SHARE * sum(len(document.content) for document in documents)
    count, held_out = 0, 0
    while held_out < wanted and count < len(documents) - 1:
        held_out += len(documents[count].content)
        count += 1
    if count == 0:
        raise ValueError(f"There is no text in {source}: no file, or only empty and binary ones.")
    return Text(tuple(documents[count:]), tuple(documents[:count]))


def _documents(source: Path | None, max_bytes: int | None) -> Iterator[Document]:
    seen: set[bytes] = set()
    room = max_bytes if max_bytes is not None else sys.maxsize
    for name, path in sorted(
        _files(source), key=lambda file: (zlib.crc32(file[0].encode()), file[0])
    ):
        if room <= 0:
            return
        content = path.read_bytes()
        if not content or SEPARATOR in content or content in seen:
            continue
        seen.add(content)
        yield Document(name, content[:room])
        room -= len(content)


def _files(source: Path | None) -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    if root.is_file():
        yield root.name, root
        return
    if not root.is_dir():
        raise ValueError(f"There is no file or directory {root}.")
    is_library = source is None
    for directory, subdirectories, files in os.walk(root):
        if is_library:
            # Not entered: what is installed there may be a hundred times the library.
            subdirectories[:] = set(subdirectories) - _SKIPPED_DIRECTORIES
            files = [file for file in files if _is_of_library(file)]
        for file in files:
            path = Path(directory, file)
            if path.is_file():
                yield path.relative_to(root).as_posix(), path


def _is_of_library(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(_SKIPPED_PREFIXES)


def _cut(document: Document) -> list[Document]:
    """Cut one document in two, the end first because the first is held out; after a line if there
    are several.
    """
    content = document.content
    cut = max(1, int(len(content) * (1 - _HELD_OUT_SHARE)))
    cut = content.rfind(b"\n", 0, cut) + 1 or cut
    parts = [
        Document(f"{document.name}[{cut}:]", content[cut:]),
        Document(f"{document.name}[:{cut}]", content[:cut]),
    ]
    return [part for part in parts if part.content]


def _joined(documents: tuple[Document, ...]) -> bytes:
    return b"".join(document.content + SEPARATOR for document in documents)
