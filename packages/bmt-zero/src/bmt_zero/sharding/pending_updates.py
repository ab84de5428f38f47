"""``PendingUpdates``: updates of a shard that nobody has waited for yet.

Parts of one shard may belong to several optimizers, each of which writes on a stream of its own: the last update to be noted
is not the last to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmt_core.run.lanes import Lane, Mark

MOST = 4
"""How many are remembered. An optimizer waits for its own last update before the next one, so there are as many as optimizers."""


@dataclass
class _Update:
    done: Mark | None  # None: the lane waits for it
    reads: object = None


class PendingUpdates:
    """When each update is done, and what it reads until then, on behalf of ``lane``, which gathers what was written."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._updates: list[_Update] = []

    def add(self, done: Mark | None = None) -> None:
        """Remember an update that is written at ``done``; None: when the computation has come to this point."""
        waiting = [update for update in self._updates if update.done is not None]
        if len(waiting) >= MOST:  # of a shard that is stepped and never used
            self.wait()
            self._updates = [update for update in self._updates if update.done is None]
            self._updates.append(_Update(self._lane.here()))
        self._updates.append(_Update(self._lane.here() if done is None else done))

    def keep_alive(self, reads: object) -> None:
        """Keep ``reads``, which the last update reads, until somebody has waited for that update."""
        if self._updates:
            self._updates[-1].reads = reads

    def wait(self) -> None:
        """Let the computation wait for all updates."""
        for update in self._updates:
            if update.done is not None:
                update.done.wait()

    def hold_up_lane(self) -> None:
        """Let the lane wait for all updates, once."""
        for update in self._updates:
            if update.done is not None:
                self._lane.after(update.done)
                update.done = None

    def forget_awaited(self) -> None:
        """Let go of updates for which the lane waits, once the computation has waited for the lane."""
        self._updates = [update for update in self._updates if update.done is not None]

    def clear(self) -> None:
        """Forget all updates: the computation has waited for them."""
        self._updates.clear()
