"""The streams and the event that BMTrain's ``config`` names; on the CPU, objects with the same methods that never wait."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from bmt_core import Runtime

STREAMS = ("calc_stream", "load_stream", "tp_comm_stream", "pp_comm_stream", "barrier_stream")
EVENTS = ("load_event",)

_made: WeakKeyDictionary[Runtime, dict[str, Any]] = WeakKeyDictionary()


class HostEvent:
    """The CPU's event: it has happened."""

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class HostStream:
    """The CPU's stream: work is done when the call returns, so there is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or a new one that has happened."""
        return HostEvent() if event is None else event

    def synchronize(self) -> None:
        """Return at once."""


def stream_or_event(runtime: Runtime, name: str) -> Any:
    """Return the stream or the event ``name`` of the run, the same one each time.

    ``calc_stream`` is the stream that computes when this is first asked for; every other one is made then.
    """
    made = _made.setdefault(runtime, {})
    if name not in made:
        made[name] = _make(runtime.device, name)
    return made[name]


def _make(device: torch.device, name: str) -> Any:
    if device.type != "cuda":
        return HostEvent() if name in EVENTS else HostStream()
    if name in EVENTS:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device) if name == "calc_stream" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def wait_loader() -> None:
    """Do nothing: kept for scripts written for BMTrain, whose parameters were loaded on a stream that they had to wait for."""
