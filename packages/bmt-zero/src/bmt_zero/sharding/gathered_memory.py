"""``GatheredMemory``: counts the bytes of gathered parameters, which ZeRO level 3 bounds."""

from __future__ import annotations


class GatheredMemory:
    """Bytes of gathered parameter buffers in this process: now, and the highest since :meth:`reset_peak`."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def change(self, size: int) -> None:
        """Count ``size`` more (or, negative, fewer) bytes."""
        self.current += size
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak = self.current


gathered_memory = GatheredMemory()
