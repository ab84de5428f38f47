"""What is raised when communication fails."""

from __future__ import annotations

from bmt_core.errors import BmtError


class NcclError(BmtError, RuntimeError):
    """A collective failed, here or on another rank, or did not finish in time.

    Raised once wherever the main thread is, because what the device has written since is not to be trusted, and by every later
    call on any group of the run.
    """
