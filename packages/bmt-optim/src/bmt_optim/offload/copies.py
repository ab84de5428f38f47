"""``Copies``: copies between device and host beside the computation, one stream for each direction.

``HostCopies`` are the same where device and host are one: copies that are done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from bmt_core.run.lanes import Mark

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of equal shapes."""


class Done(Mark, Protocol):
    """When copies are done."""

    def synchronize(self) -> None:
        """Return when they are done."""


class Copies(Protocol):
    """The copies of one device."""

    def begin(self) -> None:
        """Order the copies that follow, in both directions, after the computation so far."""

    def out(self, pairs: Pairs, after: Mark | None = None) -> Done:
        """Copy to the host, after what was copied before and, if given, ``after``, a mark on the device."""

    def back(self, pairs: Pairs) -> Done:
        """Copy to the device, after what was copied before. Sources and targets stay untouched until it is done."""


class HostCopies:
    """Done at once: see the module."""

    def begin(self) -> None:
        """See :meth:`Copies.begin`."""

    def out(self, pairs: Pairs, after: Mark | None = None) -> Done:
        """See :meth:`Copies.out`."""
        if after is not None:
            after.wait()
        return self.back(pairs)

    def back(self, pairs: Pairs) -> Done:
        """See :meth:`Copies.back`."""
        for source, target in pairs:
            target.copy_(source)
        return _Now()


class CudaCopies:
    """On two streams of ``device``; the host only ever waits for events that sleep, so that its cores are free to work."""

    def __init__(self, device: torch.device) -> None:
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def begin(self) -> None:
        """See :meth:`Copies.begin`."""
        here = torch.cuda.current_stream(self._device).record_event()
        self._out.wait_event(here)
        self._back.wait_event(here)

    def out(self, pairs: Pairs, after: Mark | None = None) -> Done:
        """See :meth:`Copies.out`."""
        with torch.cuda.stream(self._out):
            if after is not None:
                after.wait()
            return _copied(pairs, self._out)

    def back(self, pairs: Pairs) -> Done:
        """See :meth:`Copies.back`."""
        with torch.cuda.stream(self._back):
            return _copied(pairs, self._back)


def copies_of(device: torch.device) -> Copies:
    """Return new copies for ``device``."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class _Now:
    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


def _copied(pairs: Pairs, stream: torch.cuda.Stream) -> Done:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
    event: Done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)  # type: ignore[attr-defined]
    return event
