"""``GatheredMemory``: counts the bytes of gathered parameters, which ZeRO level 3 bounds."""

from __future__ import annotations


class GatheredMemory:
    """Bytes of the run's gathered parameter buffers in this process: now, and the highest since :meth:`reset_peak`.

    Runs are counted from 1. A run that failed may leave buffers that nobody frees, so those of earlier runs do not count.
    """

    def __init__(self) -> None:
        self.run = 0
        self.current = 0
        self.peak = 0

    def begin_run(self) -> None:
        """Count the buffers of a new run."""
        self.run += 1
        self.current = self.peak = 0

    def change(self, size: int, run: int) -> None:
        """Count ``size`` more (or, negative, fewer) bytes, of a buffer that was made in ``run``."""
        if run == self.run:
            self.current += size
            self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak = self.current


gathered_memory = GatheredMemory()
