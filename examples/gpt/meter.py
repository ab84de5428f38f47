"""``Meter``: the mean loss and the speed between two looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import bmtrain as bmt


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

    def read(self) -> tuple[float, float]:
        """Return mean loss and tokens per second of all ranks since the last reading.
        Collective.
        """
        loss = bmt.sum_loss(self._loss.float() / self._steps).item()
        speed = (
            self._tokens
            * bmt.current().topology.axis_size("dp")
            / (time.perf_counter() - self._started)
        )
        self._restart()
        return loss, speed

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
