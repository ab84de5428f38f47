"""A communication backend that records every call: what was recorded is in :data:`calls`,
:func:`clear` empties it.
"""

from bmt_recording.backend import RecordingBackend, RecordingGroup
from bmt_recording.records import Call, calls, clear

__all__ = ["Call", "RecordingBackend", "RecordingGroup", "calls", "clear"]
