"""What bmt asks this package."""

from __future__ import annotations

from bmt_core.plugins.hookspecs import hookimpl
from bmt_recording.backend import RecordingBackend


@hookimpl
def bmt_comm_backends() -> list[type[RecordingBackend]]:
    """Announce the backend ``"recording"``."""
    return [RecordingBackend]
