"""Writing a directory in the layout of Hugging Face: all ranks write to its files, then rank 0
writes the index.

Rank 0 creates the files with their final sizes and tells the others where each tensor belongs.
Every rank writes its parts of the tensors there, so that nothing is gathered, and sends rank 0
their checksums for the headers. A save gives its files new names, so the former model stays whole
until the index is replaced, which is atomic. Then the files of the former model are deleted. Other
files stay, except those that are saved with the model, such as ``config.json``.
"""

from __future__ import annotations

import json
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

from bmt_checkpoint.atomic import cannot_write, flush, replacing
from bmt_checkpoint.directory_reader import INDEX_FILE, MANIFEST, SINGLE_FILE
from bmt_checkpoint.hub_state import HubState
from bmt_checkpoint.range_writer import RangeWriter
from bmt_checkpoint.safetensors_format import SafetensorsFormat
from bmt_checkpoint.safetensors_layout import FileLayout, file_summary
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import world_group
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.whole_state import OwnPart, WholeState

_SHARD = re.compile(
    r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors"
    r"|\.model-(\d+-)?\d{5}-of-\d{5}\.safetensors(\.[0-9a-f]+)?\.tmp"
)
_MOST_FILES = 64  # each is opened by all ranks that have a part of its tensors
_Plan = tuple[list[str], str, dict[str, tuple[int, int]]]
"""The names of the files, the ending of their temporary names, and for each tensor the number of
its file and its offset there.
"""


class DirectorySave:
    """One save of ``state`` into ``folder``. Errors name ``what``. On rank 0, ``beside`` are files
    to write with the model.
    """

    def __init__(
        self,
        folder: Path,
        state: WholeState | HubState,
        what: str,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self._folder, self._state, self._what, self._beside = folder, state, what, beside or {}
        self._layouts: list[FileLayout] = []  # of the files; filled on rank 0
        self._unfinished: list[Path] = []  # files that rank 0 has created and no index names yet

    def batches(self) -> Iterator[Sequence[OwnPart]]:
        """Yield this rank's parts, whose elements are read only when they are written. Collective
        if a batch is gathered.
        """
        return self._state.batches()

    def parts(self) -> list[OwnPart]:
        """Return all of :meth:`batches` in one list."""
        return [part for batch in self.batches() for part in batch]

    def write(self, batches: Callable[[], Iterable[Sequence[OwnPart]]], group: Group) -> None:
        """Write what ``batches()`` yields, as often on every rank, then replace the index.
        Collective over ``group``: all ranks.

        With a snapshot of :meth:`parts` and a group of its own it may run on a thread. If it fails
        before the index is replaced, the index still names the former model, whole; files of
        ``beside`` may be new.
        """
        try:
            plan = None
            with collective_section(group, self._what):
                pending = iter(batches())
                own = next(pending, None)
            # A section of its own: while rank 0 creates files, no rank should still be copying
            # its parts.
            with collective_section(group, self._what):
                if group.rank == 0:
                    plan = self._make_files()
            self._names, self._ending, self._offsets = broadcast_object(plan, group)
            # What this rank's part adds to the CRC-32 of each tensor; it has at most one part
            # of each.
            crc_of = dict.fromkeys(self._offsets, 0)
            while own is not None:
                with collective_section(group, self._what):
                    self._write_own(own, group, crc_of)
                with collective_section(group, self._what):
                    own = None  # its memory is free before the next one is made
                    own = next(pending, None)
            sums = all_gather_object(list(crc_of.values()), group)
            with collective_section(group, self._what):
                if group.rank == 0:
                    self._publish(
                        [reduce(operator.xor, of_tensor) for of_tensor in zip(*sums, strict=True)]
                    )
        except BaseException:
            for path in self._unfinished:
                path.unlink(missing_ok=True)
            raise

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}{self._ending}"

    def _make_files(self) -> _Plan:
        """Create the files in their final sizes, without values, and return the plan that all ranks
        need. Called on rank 0.
        """
        self._layouts = [
            FileLayout(part)
            for part in _divided(self._state.index, min(world_group().size, _MOST_FILES))
        ]
        self._names = _free_names(self._folder, len(self._layouts))
        # Random digits: a rank that finds a file of this name shares the disk of rank 0, and the
        # file is of this save.
        self._ending = f".{secrets.token_hex(8)}.tmp"
        for name, layout in zip(self._names, self._layouts, strict=True):
            path = self._temporary(name)
            try:
                with path.open("wb") as file:
                    self._unfinished.append(path)
                    file.truncate(layout.file_size)
            except OSError as error:
                raise CheckpointError(cannot_write(self._folder / name, error)) from error
        layouts = enumerate(self._layouts)
        offsets = {
            name: (number, layout.offset_of(name))
            for number, layout in layouts
            for name in layout.names
        }
        return self._names, self._ending, offsets

    def _write_own(self, parts: Sequence[OwnPart], group: Group, crc_of: dict[str, int]) -> None:
        """Write ``parts``, file after file; put what each adds to the CRC-32 of its tensor
        into ``crc_of``.
        """

        def file_of(part: OwnPart) -> int:
            number: int = self._offsets[part.name][0]
            return number

        def order(part: OwnPart) -> tuple[int, int]:
            number, offset = self._offsets[part.name]
            # So that ranks begin with different files.
            return (number - group.rank) % len(self._names), offset

        for number, of_file in groupby(sorted(parts, key=order), key=file_of):
            name = self._names[number]
            try:
                with RangeWriter(self._temporary(name)) as file:
                    for part in of_file:
                        _, offset = self._offsets[part.name]
                        size = _bytes(self._state.index.entries[part.name])
                        crc_of[part.name] = file.write_part(
                            offset, part.on_host(), part.ranges, size
                        )
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{self._folder} of this rank is not that of rank 0, which made files in it"
                    " that are not there. Save to a directory that all ranks share, or to a file."
                ) from error
            except OSError as error:
                raise CheckpointError(cannot_write(self._folder / name, error)) from error

    def _publish(self, checksums: Sequence[int]) -> None:
        """Complete the files, replace the index, and delete the files that it does not name. Called
        on rank 0.
        """
        by_name = dict(zip(self._offsets, checksums, strict=True))
        try:
            for name, layout in zip(self._names, self._layouts, strict=True):
                with RangeWriter(self._temporary(name)) as file:
                    file.write(0, layout.header(by_name))
                # What cannot be loaded must be noticed now.
                SafetensorsFormat().open(self._temporary(name)).close()
                self._unfinished.append(self._folder / name)
                os.rename(self._temporary(name), self._folder / name)
            flush(self._folder)
        except OSError as error:
            raise CheckpointError(cannot_write(self._folder, error)) from error
        for name, content in self._beside.items():
            (self._folder / name).parent.mkdir(exist_ok=True)
            with replacing(self._folder / name) as temporary:
                temporary.write_bytes(content)
        with replacing(self._folder / INDEX_FILE) as temporary:
            temporary.write_text(json.dumps(self._index_content(), indent=2) + "\n")
        self._unfinished.clear()
        _delete_others(self._folder, set(self._names))

    def _index_content(self) -> dict[str, Any]:
        own = self._state.index.own_tensors
        return {
            "metadata": {
                "total_size": sum(_bytes(entry) for entry in own.values()),
                MANIFEST: {name: file_summary(self._folder / name) for name in self._names},
            },
            "weight_map": {name: self._names[self._offsets[name][0]] for name in own},
        }


def _bytes(entry: TensorEntry) -> int:
    return entry.shape.numel() * entry.dtype.itemsize


def _divided(index: Index, count: int) -> list[Index]:
    """Cut ``index`` into at most ``count`` runs of about equally many bytes. The first one has all
    entries that are not tensors.
    """
    own = index.own_tensors
    total, position = sum(map(_bytes, own.values())), 0
    runs: dict[int, set[str]] = {}
    for name, entry in own.items():
        middle = position + _bytes(entry) // 2
        runs.setdefault(min(middle * count // max(total, 1), count - 1), set()).add(name)
        position += _bytes(entry)
    return [
        Index(
            entries={
                name: entry
                for name, entry in index.entries.items()
                if (entry.source in run if isinstance(entry, TensorEntry) else number == 0)
            },
            metadata=index.metadata if number == 0 else {},
        )
        for number, run in enumerate(runs.values() or [set()])
    ]


def _free_names(folder: Path, count: int) -> list[str]:
    """Create ``folder`` if needed; return ``count`` file names that are free in it: ``model-...``,
    or else ``model-2-...``, ...
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error
    number = 1
    while True:
        stem = "model" if number == 1 else f"model-{number}"
        names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if not present.intersection(names):
            return names
        number += 1


def _delete_others(folder: Path, kept: set[str]) -> None:
    # Hugging Face's readers take a single file where there is one, and would not look at the index.
    for path in sorted(folder.iterdir()):
        if path.name not in kept and (path.name == SINGLE_FILE or _SHARD.fullmatch(path.name)):
            path.unlink()
