"""Counters in host memory that several processes and their devices share."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from bmt_core.ops import PeerLink

_DIRECTORY = Path("/dev/shm")
_APART = 16  # words from one counter to the next, so that each has a cache line of its own
_WORD = 4
WRAP = (1 << 32) - 1
"""The largest value of a counter. Counters have 32 bits; after this value comes 0."""


class PeerCounters:
    """The counters of a group of ``size`` ranks, in a memory-mapped file of /dev/shm: one for a
    failure, one per rank for its leaving, and from :attr:`first` on ``count`` that order copies.
    All are 0 at first. Those that order copies are written by streams, until the copies fail.
    """

    failed = 0
    """Index of the counter that is not 0 once the copies have failed."""

    def __init__(self, path: Path, size: int, count: int) -> None:
        self.first = 1 + size
        self._count = self.count(size, count)
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), _length(self._count))
        with torch.device("cpu"):  # whatever the default device is
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._words = memoryview(mapping).cast("I")
        self._link: PeerLink | None = None
        self._on_device = 0

    @staticmethod
    def count(size: int, count: int) -> int:
        """Return the number of all counters, of which ``count`` order copies."""
        return 1 + size + count

    def left(self, rank: int) -> int:
        """Return the index of the counter that is not 0 once this rank has left."""
        return 1 + rank

    def __getitem__(self, index: int) -> int:
        return self._words[index * _APART]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index * _APART] = value & WRAP

    def values(self) -> list[int]:
        """Return the values of all counters."""
        return self._words[: self._count * _APART : _APART].tolist()

    def map(self, link: PeerLink) -> None:
        """Map the counters into the address space of ``link``'s device. Raises ``RuntimeError`` if
        it cannot.
        """
        self._on_device = link.mapped(self._bytes.data_ptr(), self._bytes.nbytes)
        self._link = link

    def address(self, index: int) -> int:
        """Return the counter's address on the device."""
        return self._on_device + index * _APART * _WORD

    def unmap(self) -> None:
        """Undo :meth:`map`. The device must not use the counters any more."""
        if self._link is not None:
            self._link.unmap(self._bytes.data_ptr())
            self._link = None


def new_counters_file(count: int) -> Path:
    """Make a file of ``count`` counters for the processes of this host. The caller deletes it.
    Raises ``OSError``.
    """
    descriptor, name = tempfile.mkstemp(prefix="bmt-", dir=_DIRECTORY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(_length(count)))
    except OSError:
        Path(name).unlink()
        raise
    return Path(name)


def _length(count: int) -> int:
    """Return the size of the file in bytes: whole pages, because only whole pages can be mapped to
    a device.
    """
    return -(-count * _APART * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
