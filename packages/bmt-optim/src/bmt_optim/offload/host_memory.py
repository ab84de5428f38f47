"""``HostMemory``: page-locked host memory, from and to which the device copies asynchronously.

``cudaHostRegister`` locks exactly the bytes needed: torch's own allocator of such memory takes the
next power of two, up to twice the states of a large model. The worker's threads, which will update
the memory, clear it first, chunk by chunk: on machines with several memory controllers the first
write decides where memory lies. Large pages are requested, because processors read ahead only
within a page.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence

import torch

from bmt_optim.offload import worker

CHUNK = 1 << 24
"""Elements that are copied and updated at a time: 32 MiB of bfloat16, copied in 0.6 ms. Only the
first copy does not overlap.
"""
LARGE_PAGE = 1 << 21
SMALL = 1 << 20
"""Smaller memory, in bytes, comes from torch's allocator, which wastes little then; large pages
would waste more.
"""


class HostMemory:
    """Flat tensors of zeros, one for each of ``pieces`` (number of elements, dtype), page-locked
    for a CUDA ``device``.

    Each has a storage of its own, because ``torch.save`` stores whole storages.
    """

    def __init__(self, pieces: Sequence[tuple[int, torch.dtype]], device: torch.device) -> None:
        self.tensors = [self._make(numel, dtype, device) for numel, dtype in pieces]

    def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_locked = device.type == "cuda"
        size = numel * dtype.itemsize
        if not is_locked or size < SMALL:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_locked).zero_()
        memory = _map(size)
        worker.submit(
            lambda: [chunk.zero_() for chunk in torch.split(memory, CHUNK * dtype.itemsize)]
        ).result()
        _lock(memory, device)
        weakref.finalize(self, _unlock, memory, device).atexit = False
        return memory.view(dtype)


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
