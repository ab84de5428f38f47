"""What a checkpoint format must implement: :class:`CheckpointFormat`, and the
:class:`CheckpointReader` that it opens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from bmt_params.state.index import Index


@dataclass(frozen=True, kw_only=True)
class ForeignEntry:
    """A value in a file that is neither a tensor nor a module's extra state. ``type_name`` is the
    name of its class.
    """

    type_name: str


class CheckpointReader(ABC):
    """An open checkpoint. Rank 0 has one, and so has every rank that finds a checkpoint of the
    same :attr:`identity`.
    """

    index: Index
    """The names, in any order: loading looks them up."""
    identity: object = None
    """Equal on ranks that see the same files. None: reading a part costs as much as reading the
    whole, so rank 0 alone reads.
    """

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, on the CPU and contiguous. The caller does not write
        to it.
        """

    def verify(self, part: int, parts: int) -> None:
        """Read one of ``parts`` equal parts of the values, and raise :class:`CheckpointError` if
        they are damaged.

        Called before anything is loaded. A format that has checksums, and does not compare them in
        ``open``, does it here.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the file. Nothing is called afterwards."""


class CheckpointFormat(ABC):
    """A file format for tensors. A subclass has a unique ``name`` and is announced by the hook
    ``bmt_checkpoint_formats``.

    It is chosen by name or by the suffix of the path, and written on rank 0 only (the directories
    of safetensors that all ranks write are no such format: :mod:`bmt_checkpoint.directory_writer`).
    :meth:`write` gets a temporary path, and bmt renames the file when it is complete; if
    :attr:`is_directory`, it is an empty directory.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    is_directory: ClassVar[bool] = False
    keeps_ties: ClassVar[bool] = True
    """Whether a tensor with several names is stored once, and comes back as one: the ``source`` of
    its other names is the first. False: it is stored under each name.
    """
    keeps_versions: ClassVar[bool] = True
    """Whether the versions of modules, ``index.metadata``, come back. False: the format has no
    place for them, and modules load as torch loads a state dict without versions.
    """

    @abstractmethod
    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a new file at ``path``, on the main thread or another one.

        ``tensors`` can be iterated once. It yields the name and value of every tensor whose
        ``source`` is its own name, in order. A tensor is gathered when the iterator reaches it; it
        is contiguous, on the CPU, and belongs to this method. Raise :class:`CheckpointError` for a
        dtype that the format has no place for.
        """

    @abstractmethod
    def open(self, path: Path) -> CheckpointReader:
        """Open ``path``. Raise :class:`CheckpointError` if it is damaged or of another format."""

    def recognises(self, folder: Path) -> bool:
        """Whether ``folder``, whatever it is called, is a checkpoint of this format."""
        return False
