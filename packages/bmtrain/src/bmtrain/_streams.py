"""The streams and the event in BMTrain's ``config``. On the CPU they are objects with the same
methods that do nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_core import Runtime

STREAMS = ("calc_stream", "load_stream", "tp_comm_stream", "pp_comm_stream", "barrier_stream")
EVENTS = ("load_event",)


class HostEvent:
    """An event on the CPU: it has always happened."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class HostStream:
    """A stream on the CPU: work is done when the call returns, so nothing waits."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or a new one."""
        return HostEvent() if event is None else event


def stream_or_event(runtime: Runtime, name: str) -> Any:
    """Return the stream or the event ``name`` of the run, the same one each time.

    ``calc_stream`` is the current stream of the first call; the others are new.
    """
    made = runtime.state(_streams_and_events)
    if name not in made:
        made[name] = _make(runtime.device, name)
    return made[name]


def _streams_and_events(runtime: Runtime) -> dict[str, Any]:
    return {}


def _make(device: torch.device, name: str) -> Any:
    if device.type != "cuda":
        return HostEvent() if name in EVENTS else HostStream()
    if name in EVENTS:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device) if name == "calc_stream" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def wait_loader() -> None:
    """Do nothing. In BMTrain scripts had to wait for the stream on which parameters were loaded."""
