"""The format of ``torch.distributed.checkpoint`` (DCP): directories that FSDP2 and other libraries
write and read.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from bmt_checkpoint.atomic import previous_of
from bmt_checkpoint.format import CheckpointFormat, CheckpointReader, ForeignEntry
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_checkpoint.safetensors_layout import check_entries
from bmt_core.errors import CheckpointError, cause_of
from bmt_params.state.index import EXTRA_STATE, Index, TensorEntry

_METADATA = ".metadata"


class DcpFormat(CheckpointFormat):
    """Directories for ``torch.distributed.checkpoint.load(state_dict, checkpoint_id=path)``, of a
    model's flat state dict.

    Rank 0 writes, and holds all tensors in host memory meanwhile. A tied tensor is stored under
    each of its names. Files of any number of ranks can be read, one tensor at a time. The library
    compares no checksums.
    """

    name = "dcp"
    suffixes = (".dcp",)
    is_directory = True
    keeps_ties = False
    keeps_versions = False

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from torch.distributed import checkpoint as dcp

        for name, entry in index.entries.items():
            _check_dicts(name, entry)
        by_name = dict(tensors)
        check_entries({}, by_name)
        state = {
            name: by_name[entry.source] if isinstance(entry, TensorEntry) else entry
            for name, entry in index.entries.items()
        }
        try:
            with _without_warning():
                dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        except dcp.CheckpointException as error:  # which is no Exception
            _raise_causes(error, path)
        self.open(path).close()  # what cannot be loaded must be noticed now

    def open(self, path: Path) -> CheckpointReader:
        previous = previous_of(path)
        return _Reader(previous if previous.exists() and not path.exists() else path)

    def recognises(self, folder: Path) -> bool:
        return (folder / _METADATA).is_file()


class _Reader(CheckpointReader):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = _read_metadata(path)
        status = (path / _METADATA).stat()
        self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        entries = {
            name: _entry(name, item) for name, item in self._metadata.state_dict_metadata.items()
        }
        extra = self._extra_states(entries)
        others = {
            name: ForeignEntry(type_name="value of another kind")
            for name in entries
            if entries[name] is None
        }
        self.index = Index(entries={**entries, **others, **extra})

    def read(self, name: str) -> torch.Tensor:
        entry = self.index.entries[name]
        tensor: torch.Tensor = self._load(
            name, torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        )
        return tensor

    def close(self) -> None:
        return None

    def _extra_states(self, entries: dict[str, TensorEntry | None]) -> dict[str, Any]:
        """Remove the extra states from ``entries`` and return them. The library stores each value
        of a dict, and of a list with tensors, by itself.
        """
        found: dict[tuple[Any, ...], Any] = {}
        for name, path in dict(self._metadata.planner_data or {}).items():
            if name not in entries or not str(path[0]).endswith(EXTRA_STATE):
                continue
            entry = entries.pop(name)
            found[path] = self._load(
                name,
                None
                if entry is None
                else torch.empty(entry.shape, dtype=entry.dtype, device="cpu"),
            )
        return _nested(found) if found else {}

    def _load(self, name: str, value: Any) -> Any:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        metadata = self._metadata

        class Storage(dcp.FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata  # torch's method would unpickle whatever is in the file

        class Planner(DefaultLoadPlanner):
            def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
                self.original_state_dict[read_item.dest_index.fqn] = torch.load(
                    value, weights_only=True
                )

        state = {name: value}
        try:
            with _without_warning():
                planner = Planner(flatten_state_dict=False)
                dcp.load(state, storage_reader=Storage(self._path), planner=planner, no_dist=True)
        except dcp.CheckpointException as error:  # which is no Exception
            _raise_causes(error, self._path)
        return state[name]


def _check_dicts(name: str, value: Any) -> None:
    """Raise :class:`CheckpointError` for a dict in an extra state that would come back changed."""
    if isinstance(value, Mapping) and not (value and all(isinstance(key, str) for key in value)):
        raise CheckpointError(
            f"{name} has an empty dict, or one with keys that are no texts, which"
            " torch.distributed.checkpoint does not keep. Files of the torch format hold it:"
            ' save(model, "NAME.pt").'
        )
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, (Mapping, list)) else ():
        _check_dicts(name, item)


def _nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return what has ``values`` by their paths, in which the items of lists have numbers."""
    if () in values:
        return values[()]
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in values.items():
        parts.setdefault(key, {})[tuple(rest)] = value
    items = {key: _nested(part) for key, part in parts.items()}
    is_list = all(isinstance(key, int) for key in items)
    return [items[number] for number in sorted(items)] if is_list else items


@contextmanager
def _without_warning() -> Iterator[None]:
    """Silence the library's warning that only one process saves or loads, which ``no_dist``
    asks for.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _read_metadata(path: Path) -> Any:
    """Unpickle the checkpoint's metadata, in which only plain values and torch's classes for
    metadata are allowed.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    file = path / _METADATA
    if not file.is_file():
        raise CheckpointError(
            f"There is no checkpoint of torch.distributed.checkpoint in {path}: {file} is missing."
            f" {lies_there(path)}"
        )
    try:
        with file.open("rb") as opened:
            metadata = _Unpickler(opened).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        files = {info.relative_path for info in metadata.storage_data.values()}
        outside = [name for name in files if Path(name).name != name]
        missing = [name for name in files if not (path / name).is_file()]
    # Arbitrary bytes lead to arbitrary errors.
    except Exception as error:
        raise CheckpointError(
            f"{file} is damaged, or no metadata of torch.distributed.checkpoint"
            f" ({cause_of(error)})."
        ) from error
    if outside or missing:
        found = (
            f"names the file {outside[0]!r}"
            if outside
            else f"needs {', '.join(sorted(missing))}, which is not there"
        )
        raise CheckpointError(f"{file} {found}. Copy the whole directory again.")
    return metadata


class _Unpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _OTHERS = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if "." not in name and (
            module in self._MODULES or (module, name) in self._OTHERS or module == "torch"
        ):
            found = super().find_class(module, name)
        is_plain = isinstance(found, torch.dtype) or (module, name) in self._OTHERS
        if is_plain or (
            isinstance(found, type) and found.__module__ == module and module in self._MODULES
        ):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in such metadata")


def _entry(name: str, item: Any) -> TensorEntry | None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(item, TensorStorageMetadata):
        return None
    return TensorEntry(shape=torch.Size(item.size), dtype=item.properties.dtype, source=name)


def _raise_causes(error: Any, path: Path) -> NoReturn:
    """Raise the first error of a rank in torch's ``CheckpointException``: an OSError as it is, all
    others as CheckpointError.
    """
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, OSError):
        raise cause from error
    first_line = str(cause).strip().partition("\n")[0]
    raise CheckpointError(
        f"{path} cannot be read or written ({type(cause).__name__}: {first_line})."
    ) from error
