"""``Beside``: updates on a stream of their own, beside the next forward pass.

The gather of a block waits for the update of that block alone, so the others run while the first blocks compute. What the
updates read (gradients, flags) is memory of the computation: the block keeps it until its next gather has arrived, which
is after its update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRIORITY = -1
"""Before the computation, which would otherwise leave an update so little room that the gather behind it comes too late."""


class Beside:
    """Where the updates of one optimizer run; on the CPU, where they stand."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, device: torch.device) -> None:
        """Order the updates that follow after the computation so far."""
        if device.type != "cuda":
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, PRIORITY)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._streams[device].wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Inside, what is launched runs beside the computation."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.stream(self._streams[device]):
            yield

    def wait(self) -> None:
        """Order the computation after all updates."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
