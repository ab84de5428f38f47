"""``PendingUpdates``: optimizer updates of a shard that nobody has waited for yet.

Parts of one shard may belong to several optimizers, each with a stream of its own, so the update noted last need not finish last.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmt_core.run.lanes import Lane, Mark

MOST = 4
"""How many updates are remembered. An optimizer waits for its last update before the next, so there is one per optimizer."""


@dataclass
class _Update:
    done: Mark | None  # None: the lane has been told to wait for it
    reads: object = None


class PendingUpdates:
    """The mark of each update's end, and the objects that the update reads until then. ``lane`` gathers the updated shard."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._updates: list[_Update] = []

    def add(self, done: Mark | None = None) -> None:
        """Remember an update that ends at ``done``; None: at the current end of the computation's stream."""
        waiting = [update for update in self._updates if update.done is not None]
        if len(waiting) >= MOST:  # the shard is updated and never gathered
            self.wait()
            self._updates = [update for update in self._updates if update.done is None]
            self._updates.append(_Update(self._lane.here()))
        self._updates.append(_Update(self._lane.here() if done is None else done))

    def keep_alive(self, reads: object) -> None:
        """Keep ``reads``, which the latest update reads, alive until somebody has waited for this update."""
        if self._updates:
            self._updates[-1].reads = reads

    def wait(self) -> None:
        """Make the computation wait for all updates."""
        for update in self._updates:
            if update.done is not None:
                update.done.wait()

    def hold_up_lane(self) -> None:
        """Make the lane wait for all updates that it does not wait for yet."""
        for update in self._updates:
            if update.done is not None:
                self._lane.after(update.done)
                update.done = None

    def forget_awaited(self) -> None:
        """Forget updates that the lane waits for. Called once the computation has waited for the lane."""
        self._updates = [update for update in self._updates if update.done is not None]

    def clear(self) -> None:
        """Forget all updates: the computation has waited for them."""
        self._updates.clear()
