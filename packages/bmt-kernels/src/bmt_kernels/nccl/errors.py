"""``NcclError``: the error of a failed communication."""

from __future__ import annotations

from bmt_core.errors import BmtError


class NcclError(BmtError, RuntimeError):
    """A collective failed, here or on another rank, or did not finish in time.

    Raised once wherever the main thread is, because later results of the device may be wrong, and
    by every later call on any group of the run.
    """
