"""``Meter``: the mean loss, the speed and the memory between two looks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import bmtrain as bmt


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a :class:`Meter` shows, of all ranks together."""

    loss: float
    tokens_per_second: float
    milliseconds_per_step: float
    peak_memory_bytes: int
    """The most that a rank has taken so far: of its GPU, or of the host where there is none."""


class Meter:
    """Adds up losses on the device, so that a step does not wait for the device to tell
    its loss.
    """

    _loss: torch.Tensor
    _steps: int
    _tokens: int
    _started: float

    def __init__(self) -> None:
        self._restart()

    def add(self, loss: torch.Tensor, num_tokens: int) -> None:
        """Take note of one step: mean loss and number of tokens of this data rank."""
        self._loss = self._loss + loss.detach()
        self._steps += 1
        self._tokens += num_tokens

    def read(self) -> Reading:
        """Return what was measured since the last reading. Collective."""
        loss = bmt.mean_loss(self._loss.float() / self._steps).item()
        seconds = time.perf_counter() - self._started
        reading = Reading(
            loss=loss,
            tokens_per_second=self._tokens * bmt.current().topology.axis_size("dp") / seconds,
            milliseconds_per_step=1000 * seconds / self._steps,
            peak_memory_bytes=int(bmt.gather_result(torch.tensor([peak_memory()])).max()),
        )
        self._restart()
        return reading

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that passes inside out of the speed."""
        paused = time.perf_counter()
        yield
        self._started += time.perf_counter() - paused

    def _restart(self) -> None:
        self._loss = torch.zeros(())
        self._steps = 0
        self._tokens = 0
        self._started = time.perf_counter()


def peak_memory() -> int:
    """Return the most bytes that this rank has taken so far."""
    device = bmt.current().device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
