"""``PeerLink``: copies into the memory of other processes' devices on one host, beside the computation."""

from __future__ import annotations

from typing import Protocol


class PeerLink(Protocol):
    """This process's device, as one into whose memory others copy, and which copies into theirs.

    Copies take no multiprocessor: a product that occupies all of them does not delay them. What orders them are *flags*, numbers
    of four bytes in memory that the host shares with other processes. A flag counts up; to wait for a value is to wait until
    the flag is not below it. Addresses are numbers: of memory, as ``tensor.data_ptr()``, and of streams, as
    ``stream.cuda_stream``. All methods raise ``RuntimeError`` with the reason if the device cannot do it.
    """

    def shared(self, address: int, /) -> tuple[bytes, int]:
        """Return what another process opens the allocation around ``address`` with, and where in it that is, in bytes."""

    def opened(self, handle: bytes, /) -> int:
        """Return where the allocation of another process begins in this one."""

    def close(self, address: int, /) -> None:
        """Close what :meth:`opened` has returned, which nothing uses any more."""

    def mapped(self, address: int, bytes: int, /) -> int:
        """Let the device reach this memory of the host, and return at which address it does."""

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
        """On ``stream``, and after what the stream ``after`` has been given until now: wait for ``free``, copy, write ``full``."""

    def wait(self, flag: int, value: int, stream: int, /) -> None:
        """Let ``stream`` wait for ``flag``."""

    def write(self, flag: int, value: int, after: int, stream: int, /) -> None:
        """On ``stream``, and after what the stream ``after`` has been given until now: write ``flag``."""
