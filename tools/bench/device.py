"""The device: its clock, its memory, and whether its work is done. On the CPU, wall-clock time and
no figures of memory.
"""

from __future__ import annotations

import gc
import threading
import time
from itertools import pairwise
from typing import Any

import torch

GIB = 1024**3
# The allocator of every rank gets the same share, so that ranks run out of memory at the same
# place; the rest is for what lies outside of it: the CUDA context and NCCL's buffers, which are not
# equally large on all ranks.
ALLOCATOR_SHARE = 0.94
_DRAIN_SECONDS = 60.0


class StepClock:
    """Marks between steps that do not wait for the device: events on the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """End one step and begin the next."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between the marks; call it when the device is done."""
        if self._device.type != "cuda":
            return [later - earlier for earlier, later in pairwise(self._marks)]
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(self._marks)]


def prepare(device: torch.device) -> None:
    """Bound the allocator; once per process."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(ALLOCATOR_SHARE, device)


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_drained(device: torch.device) -> bool:
    """Whether the device finishes its work; False when it still has some after a minute, waiting
    for another rank.
    """
    waiter = threading.Thread(target=synchronize, args=(device,), daemon=True)
    waiter.start()
    waiter.join(_DRAIN_SECONDS)
    return not waiter.is_alive()


def free_memory(device: torch.device, *, compiled: bool) -> None:
    """Give back what the last case left, and forget what was compiled for its shapes."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def allocated_gib(device: torch.device) -> float | None:
    """GiB that tensors hold now."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None


def peak_gib(device: torch.device) -> tuple[float, float] | None:
    """Highest GiB held by tensors, and by the allocator, since :func:`free_memory`."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(
        device
    ) / GIB
