"""Streams and events of the run's device; on the CPU, objects with the same methods that have nothing to wait for."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Stream(Protocol):
    """What scripts do with a stream."""

    def wait_stream(self, stream: Any) -> None:
        """Order this stream after what ``stream`` has been given so far."""

    def synchronize(self) -> None:
        """Return when everything given to this stream is done."""


class Event(Protocol):
    """What scripts do with an event."""

    def record(self, stream: Any = None) -> None:
        """Mark this point of ``stream``."""

    def synchronize(self) -> None:
        """Return when the marked point is reached."""


class HostStream:
    """The CPU's stream: work is done when the call returns, so there is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Event:
        """Return an event that has happened."""
        return event if event is not None else HostEvent()

    def synchronize(self) -> None:
        """Return at once."""


class HostEvent:
    """The CPU's event: it has happened."""

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def make_stream(device: torch.device, *, current: bool) -> Stream:
    """Return a stream of ``device``: the one that computes (``current``), or a new one."""
    if device.type != "cuda":
        return HostStream()
    stream: Stream = torch.cuda.current_stream(device) if current else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def make_event(device: torch.device) -> Event:
    """Return an event of ``device``."""
    if device.type != "cuda":
        return HostEvent()
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
