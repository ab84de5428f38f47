"""``Writes``: the updates of a shard that nobody has waited for yet.

Parts of one shard may belong to several optimizers, each of which writes in an order of its own: the last to tell is not the
last to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmt_core.run.lanes import Lane, Mark

MOST = 4
"""How many are remembered. An optimizer waits for its own last update before the next one, so there are as many as optimizers."""


@dataclass
class _Write:
    mark: Mark | None  # None: the lane waits for it
    kept: object = None


class Writes:
    """Marks of updates, and what the updates read until then, on behalf of ``lane``."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._writes: list[_Write] = []

    def add(self, mark: Mark | None = None) -> None:
        """Remember an update that is there at ``mark``; None: when the computation has come to this point."""
        pending = [write for write in self._writes if write.mark is not None]
        if len(pending) >= MOST:  # of a shard that is stepped and never used
            for write in pending:
                assert write.mark is not None
                write.mark.wait()
            self._writes = [write for write in self._writes if write.mark is None]
            self._writes.append(_Write(self._lane.here()))
        self._writes.append(_Write(self._lane.here() if mark is None else mark))

    def keep(self, objects: object) -> None:
        """Keep ``objects``, which the last update reads, until the computation has waited for it."""
        if self._writes:
            self._writes[-1].kept = objects

    def wait(self) -> None:
        """Let the computation wait for all of them."""
        for write in self._writes:
            if write.mark is not None:
                write.mark.wait()

    def hold_up_lane(self) -> None:
        """Let the lane wait for all of them, once."""
        for write in self._writes:
            if write.mark is not None:
                self._lane.after(write.mark)
                write.mark = None

    def forget(self) -> None:
        """Let go of what was kept for updates for which the computation has waited, by itself or through the lane."""
        self._writes = [write for write in self._writes if write.mark is not None]

    def clear(self) -> None:
        """Forget all of them: the computation has waited."""
        self._writes.clear()
