"""``PeerLink``: copies into the memory of other processes' devices on one host, beside
the computation.
"""

from __future__ import annotations

from typing import Protocol


class PeerLink(Protocol):
    """Copies from this process's device into the memory of other processes' devices.

    Copies take no multiprocessor: a product that occupies all of them does not delay them. They are
    ordered by *flags*, numbers of four bytes in host memory that processes share. A flag counts up;
    a wait for a value ends when the flag is at least this value. Addresses are numbers: of memory,
    as ``tensor.data_ptr()``, and of streams, as ``stream.cuda_stream``. All methods raise
    ``RuntimeError`` with the reason if the device cannot do it.
    """

    def shared(self, address: int, /) -> tuple[bytes, int]:
        """Return a handle by which another process opens the allocation around ``address``, and the
        offset of ``address``.
        """

    def opened(self, handle: bytes, /) -> int:
        """Open the allocation of another process by its ``handle``; return its address in
        this process.
        """

    def close(self, address: int, /) -> None:
        """Close what :meth:`opened` has returned, which nothing uses any more."""

    def mapped(self, address: int, bytes: int, /) -> int:
        """Make this host memory accessible to the device, and return its address there."""

    def unmap(self, address: int, /) -> None:
        """Undo :meth:`mapped`."""

    def copy(
        self,
        source: int,
        bytes: int,
        target: int,
        free: int,
        free_value: int,
        full: int,
        full_value: int,
        after: int,
        stream: int,
        /,
    ) -> None:
        """On ``stream``, after all work queued on the stream ``after`` until now: wait for
        ``free``, copy, write ``full``.
        """

    def wait(self, flag: int, value: int, stream: int, /) -> None:
        """Let ``stream`` wait for ``flag``."""

    def write(self, flag: int, value: int, after: int, stream: int, /) -> None:
        """On ``stream``, after all work queued on the stream ``after`` until now:
        write ``flag``.
        """
