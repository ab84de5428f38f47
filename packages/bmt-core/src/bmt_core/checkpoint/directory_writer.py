"""Writing a directory in the layout of Hugging Face: every rank writes a file, then rank 0 the index, which makes them a model.

The files of a save have names that no file in the directory has, so what was there stays whole until the index is replaced,
which is atomic. Then the files of the former model are deleted. Other files, such as ``config.json``, stay.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bmt_core.checkpoint.atomic import cannot_write, replacing
from bmt_core.checkpoint.directory_reader import INDEX_FILE, MANIFEST, SINGLE_FILE
from bmt_core.checkpoint.format import Index, TensorEntry
from bmt_core.checkpoint.safetensors_format import SafetensorsFormat
from bmt_core.checkpoint.safetensors_layout import file_summary
from bmt_core.checkpoint.whole_state import WholeState, world_group
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError

_SHARD = re.compile(r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors|\.model-(\d+-)?\d{5}-of-\d{5}\.safetensors\.tmp")


class DirectorySave:
    """The tensors of ``state`` on their way into ``folder``: :meth:`tensors` gathers them, :meth:`write` writes them."""

    def __init__(self, folder: Path, state: WholeState, what: str) -> None:
        """Decide which rank writes what. Collective."""
        self._shares = state.shares()
        self._state = state
        self._what = what
        self._folder = folder
        self._index = state.index
        group = world_group()
        writers = [i for i, share in enumerate(self._shares) if share or i == 0]
        with collective_section(group, what):
            stem = _free_stem(folder, len(writers)) if group.rank == 0 else ""
        stem = broadcast_object(stem, group)
        self._files = {i: _file_name(stem, number, len(writers)) for number, i in enumerate(writers, 1)}
        self._own_share = state.own_share

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of what this rank writes. Collective: see :meth:`WholeState.tensors_of_share`."""
        return self._state.tensors_of_share(self._shares)

    def copies(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return what this rank writes, as it is now. Collective: see :meth:`WholeState.snapshot_of_share`."""
        with collective_section(world_group(), self._what):
            return self._state.snapshot_of_share(self._shares)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], group: Group) -> None:
        """Write ``tensors``, and replace the index when all ranks have. Collective over ``group``, which is all ranks.

        With :meth:`copies` and a group of its own it may run on a thread. If it fails, the directory is as it was.
        """
        try:
            with collective_section(group, self._what):
                try:
                    self._write_own(tensors)
                finally:
                    deque(tensors, maxlen=0)  # gathers are collective: a rank whose disk is full makes them all too
            self._publish(group)
        except BaseException:
            if self._own_file is not None:
                self._own_file.unlink(missing_ok=True)
            raise

    @property
    def _own_file(self) -> Path | None:
        """This rank's file; None if there are fewer tensors than ranks and it writes none."""
        name = self._files.get(self._own_share)
        return None if name is None else self._folder / name

    def _write_own(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._own_file is not None:
            with replacing(self._own_file) as temporary:
                SafetensorsFormat().write(temporary, self._index_of_share(), tensors)

    def _publish(self, group: Group) -> None:
        """Replace the index, and delete the files that it does not name."""
        with collective_section(group, self._what):
            own = None if self._own_file is None else (self._own_file.name, file_summary(self._own_file))
        summaries = dict(summary for summary in all_gather_object(own, group) if summary is not None)
        with collective_section(group, self._what):
            if group.rank == 0:
                self._check_visible(summaries)
                with replacing(self._folder / INDEX_FILE) as temporary:
                    temporary.write_text(json.dumps(self._index_content(summaries), indent=2) + "\n")
                _delete_others(self._folder, set(summaries))

    def _index_of_share(self) -> Index:
        share = set(self._shares[self._own_share])
        is_first = self._own_share == 0
        entries = {
            name: entry
            for name, entry in self._index.entries.items()
            if (entry.source in share if isinstance(entry, TensorEntry) else is_first)
        }
        return Index(entries=entries, metadata=self._index.metadata if is_first else {})

    def _check_visible(self, summaries: dict[str, dict[str, Any]]) -> None:
        for name, summary in summaries.items():
            path = self._folder / name
            if not path.is_file() or file_summary(path) != summary:
                raise CheckpointError(
                    f"Rank 0 does not see {path} as another rank wrote it. Save to a directory that all ranks share, or to a file."
                )

    def _index_content(self, summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
        own = {name: entry for name, entry in self._index.entries.items() if isinstance(entry, TensorEntry)}
        weight_map = {name: self._files[i] for i, share in enumerate(self._shares) for name in share}
        total = sum(own[name].shape.numel() * own[name].dtype.itemsize for name in weight_map)
        in_order = {name: weight_map[name] for name in own if name in weight_map}
        return {"metadata": {"total_size": total, MANIFEST: summaries}, "weight_map": in_order}


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.safetensors"


def _free_stem(folder: Path, count: int) -> str:
    """Make ``folder`` if need be, and return the first of ``model``, ``model-2``, ... with which no file is called."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error
    number = 1
    while True:
        stem = "model" if number == 1 else f"model-{number}"
        if not present.intersection(_file_name(stem, i, count) for i in range(1, count + 1)):
            return stem
        number += 1


def _delete_others(folder: Path, kept: set[str]) -> None:
    # Hugging Face's readers take a single file where there is one, and would not look at the index.
    for path in sorted(folder.iterdir()):
        if path.name not in kept and (path.name == SINGLE_FILE or _SHARD.fullmatch(path.name)):
            path.unlink()
