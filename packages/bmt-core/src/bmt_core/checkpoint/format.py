"""What a checkpoint format must provide: :class:`CheckpointFormat` writes and opens, :class:`CheckpointReader` reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

EXTRA_STATE = "_extra_state"
"""torch's name for what is no tensor in a state dict."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint.

    ``source`` is the first name under which the same memory is stored: its own, unless it is tied.
    """

    shape: torch.Size
    dtype: torch.dtype
    source: str


@dataclass(frozen=True, kw_only=True)
class ForeignEntry:
    """Something in a file that is neither a tensor nor a module's extra state. ``type_name`` is the name of its class."""

    type_name: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a checkpoint holds, without the tensors' values.

    ``entries`` has all names in order: a :class:`TensorEntry`, the value itself for a module's extra state (names that
    end in ``_extra_state``), or a :class:`ForeignEntry`. ``metadata`` is torch's: the versions of the modules by prefix.
    """

    entries: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)


class CheckpointReader(ABC):
    """An open checkpoint, on rank 0."""

    index: Index

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, on the CPU and contiguous; it is not written to."""

    @abstractmethod
    def close(self) -> None:
        """Give the file back. No call is made afterwards."""


class CheckpointFormat(ABC):
    """A way to keep tensors in a file. A subclass has a unique ``name`` and is announced by the hook
    ``bmt_checkpoint_formats``.

    It is chosen by name or by the suffix of the file, and used on rank 0 only. It never sees a file that others rely
    on: :meth:`write` is given a temporary path, and bmt puts the file in its place when it is complete.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a new file at ``path``, maybe on another thread than the main one.

        ``tensors`` can be iterated once: every tensor whose ``source`` is its own name, in order, on the CPU,
        contiguous and owned by the receiver. Each is gathered when it is asked for.
        """

    @abstractmethod
    def open(self, path: Path) -> CheckpointReader:
        """Open ``path``; raise :class:`CheckpointError` when it is not whole or not of this format."""
