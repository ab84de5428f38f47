"""``HostMemory``: flat tensors of page-locked host memory.

The worker's threads, which will update the memory, clear it first, chunk by chunk: the first write
decides where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.run.locked_memory import LockedMemory
from bmt_optim.offload import worker

CHUNK = 1 << 24
"""Elements that are copied and updated at a time: 32 MiB of bfloat16, copied in 0.6 ms. Only the
first copy does not overlap.
"""
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
        self._locked: list[LockedMemory] = []
        self.tensors = [self._make(numel, dtype, device) for numel, dtype in pieces]

    def _make(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_locked = device.type == "cuda"
        size = numel * dtype.itemsize
        if not is_locked or size < SMALL:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=is_locked).zero_()

        def clear(memory: torch.Tensor) -> None:
            chunks = torch.split(memory, CHUNK * dtype.itemsize)
            worker.submit(lambda: [chunk.zero_() for chunk in chunks]).result()

        self._locked.append(LockedMemory(size, device, clear))
        return self._locked[-1].bytes.view(dtype)
