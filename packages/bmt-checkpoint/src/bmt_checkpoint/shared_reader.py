"""``opened_by_all``: each rank reads a checkpoint by itself if all see the same files; otherwise
rank 0 reads it for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bmt_checkpoint.format import CheckpointReader, ForeignEntry
from bmt_checkpoint.format_choice import FormatChoice, open_checkpoint
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import world_group
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.serialization import from_bytes, to_bytes
from bmt_params.state.state_tensors import StoredTensor


@dataclass(frozen=True)
class SharedReader:
    """An open checkpoint. If ``all_read``, every rank has a ``reader``, otherwise rank 0 alone."""

    index: Index
    reader: CheckpointReader | None
    all_read: bool
    what: str

    def verify(self) -> None:
        """Raise :class:`CheckpointError` on every rank if the values are damaged. Collective: each
        rank reads its share.
        """
        group = world_group()
        with collective_section(group, self.what):
            if self.reader is not None:
                self.reader.verify(*((group.rank, group.size) if self.all_read else (0, 1)))

    def stored(self, name: str) -> StoredTensor:
        """Return a handle that reads the tensor ``name`` later. Called on ranks with a reader."""
        reader, entry = self.reader, self.index.entries.get(name)
        assert reader is not None
        if not isinstance(entry, TensorEntry):
            raise CheckpointError(
                f"The state names the tensor {name!r}, which its files lack. They belong to another"
                " checkpoint: copy the whole directory again."
            )
        return StoredTensor(
            shape=entry.shape, dtype=entry.dtype, read=lambda: reader.read(entry.source)
        )


@contextmanager
def opened_by_all(source: Path, what: str, format: FormatChoice = None) -> Iterator[SharedReader]:
    """Open ``source`` on rank 0, and on all ranks if they see the same files. Collective at
    its beginning.

    If rank 0 cannot open it, every rank raises an error that names ``what``.
    """
    group = world_group()
    with ExitStack() as opened:
        reader: CheckpointReader | None = None
        with collective_section(group, what):
            if group.rank == 0:
                reader = open_checkpoint(source, format)
                opened.callback(reader.close)
        index, identity = _broadcast_index(reader, group)
        all_read = identity is not None
        if all_read:
            reader = reader or _open_same(identity, source, format, opened)
            all_read = all(all_gather_object(reader is not None, group))
        yield SharedReader(index, reader if all_read or group.rank == 0 else None, all_read, what)


def _open_same(
    identity: object, source: Path, format: FormatChoice, opened: ExitStack
) -> CheckpointReader | None:
    """Open ``source`` on this rank; None if it is not there, or not what rank 0 found."""
    try:
        reader = open_checkpoint(source, format)
    except CheckpointError:
        return None
    opened.callback(reader.close)
    return reader if reader.identity == identity else None


def _broadcast_index(reader: CheckpointReader | None, group: Group) -> tuple[Index, object]:
    """Return the index and the identity of rank 0's ``reader``."""
    message = None
    if reader is not None:
        entries = reader.index.entries
        extra = {
            name: value
            for name, value in entries.items()
            if not isinstance(value, (TensorEntry, ForeignEntry))
        }
        # Not by pickle alone, which does not know every dtype that the tensors in an extra state
        # may have.
        message = (
            {**entries, **dict.fromkeys(extra)},
            to_bytes(extra),
            dict(reader.index.metadata),
            reader.identity,
        )
    entries, extra_bytes, metadata, identity = broadcast_object(message, group)
    return Index(entries={**entries, **from_bytes(extra_bytes)}, metadata=metadata), identity
