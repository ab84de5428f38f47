"""``repeat``: run a step several times and time each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.device import StepClock, synchronize
from bench.ranks import together


def repeat(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Return the seconds of each of ``count`` steps; nothing waits for the device in between.
    Collective.
    """
    clock = StepClock(device)

    def steps() -> None:
        clock.mark()
        for _ in range(count):
            step()
            clock.mark()

    together(steps)
    together(lambda: synchronize(device))
    return clock.seconds()
