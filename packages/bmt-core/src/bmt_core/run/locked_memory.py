"""``LockedMemory``: page-locked host memory, from and to which the device copies asynchronously.

``cudaHostRegister`` locks exactly the bytes needed: torch's own allocator of such memory takes the
next power of two, up to twice the states of a large model. Large pages are requested, because
processors read ahead only within a page.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable

import torch

LARGE_PAGE = 1 << 21


class LockedMemory:
    """``bytes``: ``size`` bytes, locked for a CUDA ``device`` as long as this object lives, with a
    storage of their own. For the CPU they are ordinary memory.

    ``clear`` writes to the memory before it is locked: on machines with several memory controllers
    the first write decides where memory lies.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        clear: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.bytes = _map(size)
        if clear is not None:
            clear(self.bytes)
        if device.type == "cuda":
            _lock(self.bytes, device)
            weakref.finalize(self, _unlock, self.bytes, device).atexit = False


def _map(size: int) -> torch.Tensor:
    """Return ``size`` bytes in pages of their own, large ones where the system has them."""
    pages = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that is built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=-address % LARGE_PAGE)


def _lock(memory: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error):
        raise RuntimeError(
            f"{memory.numel() / 2**30:.1f} GiB of host memory could not be page-locked for {device}"
            f" ({error}). Free memory on the host, raise its limit (ulimit -l), or use fewer ranks"
            " per host."
        )


def _unlock(memory: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
