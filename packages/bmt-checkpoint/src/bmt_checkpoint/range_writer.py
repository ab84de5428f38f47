"""``RangeWriter``: writes parts of a file that other ranks write to at the same time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from bmt_checkpoint.checksum import followed_by
from bmt_checkpoint.memory_pieces import PIECE, bytes_of, pieces


class RangeWriter:
    """An existing file, open for writing. Adjacent data is joined into writes of up to 1 MiB; on
    exit all is on the disk.

    The file is open for writing only and already has its final size. Otherwise an NFS client may
    write whole pages, over what other machines wrote beside its range: it does if it has read the
    pages, or if the file ends before them.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY)
        # The second: where the waiting bytes end in the file.
        self._waiting, self._end = bytearray(), 0

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write_waiting()
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Write ``data`` from byte ``offset`` of the file on, and return its CRC-32."""
        checksum = 0
        for piece in pieces(data):
            checksum = zlib.crc32(piece, checksum)
            if offset != self._end or len(self._waiting) + len(piece) > PIECE:
                self._write_waiting()
            self._end = offset = offset + len(piece)
            if len(piece) == PIECE:
                self._write(piece)
            else:
                self._waiting += piece
        return checksum

    def write_part(
        self, offset: int, part: torch.Tensor, ranges: Sequence[tuple[int, int]], size: int
    ) -> int:
        """Write elements of a tensor of ``size`` bytes that begins at byte ``offset`` of the file:
        ``part``, 1-D and on the CPU.

        ``ranges`` say which of the tensor's elements these are. Returns their contribution to the
        tensor's CRC-32: see :func:`followed_by`.
        """
        # The memory of x.conj() has the values of x.
        part = part.resolve_conj().resolve_neg()
        data, itemsize = memoryview(bytes_of(part)).cast("B"), part.element_size()
        taken = checksum = position = 0
        for start, end in ranges:
            start, end = start * itemsize, end * itemsize
            found = self.write(offset + start, data[taken : taken + end - start])
            checksum = followed_by(checksum, end - position) ^ found
            taken, position = taken + end - start, end
        assert taken == len(data)
        return followed_by(checksum, size - position)

    def _write_waiting(self) -> None:
        # Waiting bytes end at ``_end``: they are written before data of any other offset is taken.
        waiting, self._waiting = self._waiting, bytearray()
        self._write(memoryview(waiting))

    def _write(self, data: memoryview) -> None:
        offset = self._end - len(data)
        while data:  # a full disk may take a part
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written
