"""``bytes_of``: the memory of a tensor; ``pieces``: memory cut into parts that fit into a
processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

PIECE = 1 << 20
"""Bytes of a piece."""


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char] | bytes:
    """Return the memory of ``tensor``, which is contiguous and on the CPU, and must live as long as
    the result.
    """
    # Not .numpy(): numpy is no dependency.
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def pieces(data: Any) -> Iterator[memoryview]:
    """Yield the bytes of ``data``, any object with memory, in order, in pieces of at most 1 MiB.

    If each piece is checksummed and then written, memory is read once. And a file system may be
    slow in single large writes: ext4 of Linux 6 took 4 s for 8 of 64 MiB, and 0.5 s for 512 of
    1 MiB.

    >>> long = bytes((1 << 20) + 5)
    >>> [bytes(piece) for piece in pieces(b"abc")], [len(piece) for piece in pieces(long)]
    ([b'abc'], [1048576, 5])
    """
    view = memoryview(data).cast("B")
    for start in range(0, view.nbytes, PIECE):
        yield view[start : start + PIECE]
