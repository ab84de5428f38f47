"""Directories in the layout of Hugging Face: one file, or several and an index that says which
tensor is in which file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bmt_checkpoint.format import CheckpointReader, ForeignEntry
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_checkpoint.safetensors_layout import file_summary
from bmt_core.errors import CheckpointError, cause_of
from bmt_params.state.index import Index, TensorEntry

OpenFile = Callable[[Path], CheckpointReader]

SINGLE_FILE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
INDEX_FILE = SINGLE_FILE + INDEX_SUFFIX
MANIFEST = "bmt_files"
"""In the index file's metadata: the size of each file and the CRC-32 of its header, which has the
checksums of its tensors.
"""

# In the order in which Hugging Face's from_pretrained() looks for them.
_CANDIDATES = (SINGLE_FILE, INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin" + INDEX_SUFFIX)


def open_directory(folder: Path, open_file: OpenFile) -> CheckpointReader:
    """Open the model in ``folder``."""
    for name in _CANDIDATES:
        path = folder / name
        if path.is_file():
            return open_index(path, open_file) if name.endswith(INDEX_SUFFIX) else open_file(path)
    raise CheckpointError(
        f"{folder} is a directory, and no file in it is one of {', '.join(_CANDIDATES)}."
        f" {lies_there(folder)} Name the file to load."
    )


def open_index(path: Path, open_file: OpenFile) -> CheckpointReader:
    """Open the files that the index file ``path`` names, which lie beside it."""
    content = read_index(path)
    manifest = content["metadata"].get(MANIFEST)
    # A file may hold extra state alone.
    files = sorted({*content["weight_map"].values(), *(manifest or ())})
    readers: dict[str, CheckpointReader] = {}
    try:
        for file in files:
            if manifest is not None:
                _check_manifest(path, file, manifest)
            readers[file] = open_file(path.parent / file)
        return _DirectoryReader(path, content["weight_map"], readers)
    except BaseException:
        for reader in readers.values():
            reader.close()
        raise


def read_index(path: Path) -> dict[str, Any]:
    """Return the index file's ``weight_map`` (names to files) and ``metadata``;
    :class:`CheckpointError` if it is not one.
    """
    try:
        content = json.loads(path.read_bytes())
        weight_map, metadata = content["weight_map"], content.get("metadata") or {}
        texts = [*weight_map.keys(), *weight_map.values()]
        is_right = isinstance(metadata, dict) and bool(weight_map or metadata.get(MANIFEST))
        files = [*weight_map.values(), *(metadata.get(MANIFEST) or ())] if is_right else []
        is_right = is_right and all(isinstance(text, str) for text in [*texts, *files])
    # Arbitrary bytes lead to arbitrary errors.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or no index of a checkpoint ({cause_of(error)})."
        ) from error
    outside = (
        [f for f in files if f in ("", ".", "..") or os.path.basename(f) != f] if is_right else []
    )
    if not is_right or outside:
        found = f": it names the file {outside[0]!r}" if outside else ""
        raise CheckpointError(
            f"{path} is damaged, or no index of tensors in files beside it{found}."
        )
    return {"weight_map": weight_map, "metadata": metadata}


def _check_manifest(path: Path, file: str, manifest: Any) -> None:
    entry = manifest.get(file) if isinstance(manifest, dict) else None
    shard = path.parent / file
    if not shard.is_file():
        raise CheckpointError(
            f"{path} names the file {file}, which is not there. Copy the directory again."
        )
    if entry != file_summary(shard):
        raise CheckpointError(
            f"{shard} is not the file that was saved with {path.name}: its size or its header"
            " differs. It was cut short, or copied from another checkpoint. Copy the"
            " directory again."
        )


class _DirectoryReader(CheckpointReader):
    def __init__(
        self, path: Path, weight_map: Mapping[str, str], readers: Mapping[str, CheckpointReader]
    ) -> None:
        self._readers = readers
        self._files = dict(weight_map)
        entries: dict[str, Any] = {}
        versions: dict[str, Any] = {}
        for name, file in weight_map.items():
            entry = readers[file].index.entries.get(name)
            if not isinstance(entry, (TensorEntry, ForeignEntry)):
                raise CheckpointError(
                    f"{path} says that {name} is in {file}, and it is not there. Files were"
                    " mixed up."
                )
            entries[name] = entry
            if isinstance(entry, TensorEntry):
                self._files.setdefault(entry.source, file)
        for file, reader in readers.items():
            versions.update(reader.index.metadata)
            for name, entry in reader.index.entries.items():
                is_tied = (
                    isinstance(entry, TensorEntry)
                    and entry.source != name
                    and entry.source in entries
                )
                if name not in entries and (
                    is_tied or not isinstance(entry, (TensorEntry, ForeignEntry))
                ):
                    entries[name] = entry
                    self._files[name] = file
        self.index = Index(entries=entries, metadata=versions)
        identities = [reader.identity for reader in readers.values()]
        self.identity = None if None in identities else tuple(identities)

    def read(self, name: str) -> torch.Tensor:
        return self._readers[self._files[name]].read(name)

    def verify(self, part: int, parts: int) -> None:
        for number, reader in enumerate(self._readers.values()):
            # Shifted from file to file, so that no rank verifies the first tensor of each: files
            # may have few tensors.
            reader.verify((part + number) % parts, parts)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
