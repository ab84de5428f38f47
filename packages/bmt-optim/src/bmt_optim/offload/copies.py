"""``Copies``: copies between a device and the host, on streams of their own, one for
each direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from bmt_core.comm.protocols import Finished
from bmt_core.run.lanes import Mark

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of equal shapes."""


class Copied(Mark, Protocol):
    """The end of some copies."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


class Copies:
    """Copies from the CPU to the CPU, which are done when a call returns; :class:`CudaCopies`
    overrides all methods.
    """

    def begin(self) -> None:
        """Make the following copies, in both directions, wait for the computation so far."""

    def to_host(self, pairs: Pairs, after: Mark | None = None) -> Copied:
        """Copy to the host, after the earlier copies to it and, if given, after the
        mark ``after``.
        """
        if after is not None:
            after.wait()
        return self.to_device(pairs)

    def to_device(self, pairs: Pairs) -> Copied:
        """Copy to the device, after the earlier copies to it. Nobody may change the sources, or use
        the targets, until then.
        """
        for source, target in pairs:
            target.copy_(source)
        return _AlreadyCopied()


class CudaCopies(Copies):
    """Copies on two streams of ``device``. A host thread that waits for a copy sleeps and leaves
    its core free.
    """

    def __init__(self, device: torch.device) -> None:
        # torch does not annotate it.
        self._to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def begin(self) -> None:
        here = torch.cuda.current_stream(self._device).record_event()
        self._to_host.wait_event(here)
        self._to_device.wait_event(here)

    def to_host(self, pairs: Pairs, after: Mark | None = None) -> Copied:
        with torch.cuda.stream(self._to_host):
            if after is not None:
                after.wait()
            return _copy(pairs, self._to_host)

    def to_device(self, pairs: Pairs) -> Copied:
        with torch.cuda.stream(self._to_device):
            return _copy(pairs, self._to_device)


def _copy(pairs: Pairs, stream: torch.cuda.Stream) -> Copied:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
    event: Copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)  # type: ignore[attr-defined]
    return event


class _AlreadyCopied(Finished):
    def synchronize(self) -> None:
        return None


class HostNumber:
    """A host copy of a one-element tensor, made at this point of the device's current stream, for
    another thread.
    """

    def __init__(self, number: torch.Tensor) -> None:
        number = number.detach().reshape(()).to(torch.float32)
        self._event: torch.cuda.Event | None = None
        if number.device.type == "cuda":
            self._copy = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))
        else:
            self._copy = number.clone()

    def read(self) -> torch.Tensor:
        """Wait until the device has made the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
