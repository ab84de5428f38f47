"""``PeerWatch``: ends copies between ranks when a rank does not come.

[Note: when a rank fails] A stream that waits for a counter waits for ever if the other rank does
not come. So a thread ends the copies when one is missing and no counter has changed for the run's
timeout. It waits only :data:`_PATIENCE` seconds if a rank has left, :data:`_PATIENCE_AT_THE_END` if
this rank is shutting down, and not at all if the run has failed already. To end them it raises all
counters above every value that a stream waits for, so that all streams go on, with wrong values. It
says so at once. From then on every copy raises, on every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bmt_core.comm.observer import Awaited as AwaitedRanks
from bmt_core.comm.protocols import Group
from bmt_core.errors import CallError
from bmt_core.run.runtime import Runtime
from bmt_core.threads import start_thread_that_may_stay
from bmt_tp.peers.peer_counters import WRAP, PeerCounters

logger = logging.getLogger("bmt_tp")
_LIFT = 1 << 30
_PERIOD = 0.25  # seconds between two checks of the thread
_PATIENCE = 3.0  # seconds without a change of a counter until copies fail, once a rank has left
_PATIENCE_AT_THE_END = 60.0  # the same, once this rank shuts down
_NAP = 0.001  # seconds between two looks of a rank that waits for the end of its copies


class Awaited(NamedTuple):
    """The index of a ``counter`` that member ``rank`` of the group must bring to ``value``."""

    rank: int
    counter: int
    value: int


class PeerWatch:
    """The thread of [Note: when a rank fails].

    ``awaited()`` returns the counters for which this rank's streams wait. If several ranks are
    missing, errors name those of the first counters.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        counters: PeerCounters,
        awaited: Callable[[], Iterable[Awaited]],
    ) -> None:
        self._rank = runtime.rank
        self._observer = runtime.observer
        self._timeout = runtime.settings.timeout
        self._counters = counters
        self._group = group
        self._awaited = awaited
        self._failure = ""
        self._waits: AwaitedRanks | None = None
        # The last values before a failure raised the counters.
        self._seen = counters.values()
        self._is_leaving = False
        runtime.observer.waits(lambda: self._waits)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bmt-peers", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise :class:`CallError` if the copies have failed, with the failure of the run."""
        if self._failure or self._counters[PeerCounters.failed]:
            raise CallError(
                self._observer.wait_for_failure() or self._failure or self._failed_elsewhere()
            )

    def shorten_timeout(self) -> None:
        """Note that this rank is shutting down: from now on copies fail after
        ``_PATIENCE_AT_THE_END`` seconds without a change.
        """
        self._is_leaving = True

    def wait_until_ended(self) -> None:
        """Wait until no copy is missing, or the copies have failed."""
        while self._missing() and not self._failure:
            time.sleep(_NAP)

    def leave(self) -> None:
        """End the thread, and tell the other ranks that this rank has left. No copy may be
        under way.
        """
        self._is_stopping.set()
        self._thread.join()
        self._waits = None
        self._counters[self._counters.left(self._group.rank)] = 1

    def _run(self) -> None:
        since = time.monotonic()
        while not self._is_stopping.wait(_PERIOD):
            if self._has_moved() or not self._missing():
                since = time.monotonic()
            still = time.monotonic() - since
            self._waits = self._wait() if still > _PATIENCE else None
            if not self._failure:
                self._failure = self._reason(still)
                if self._failure:
                    self._counters[PeerCounters.failed] = 1
                    # The store may not answer any more.
                    start_thread_that_may_stay(self._tell, name="bmt-peers-tell")
            if self._failure:
                self._lift()

    def _has_moved(self) -> bool:
        before, now = self._seen, self._counters.values()
        if not self._counters[PeerCounters.failed]:
            self._seen = now
        return now != before

    def _missing(self) -> list[int]:
        """Return the ranks, once for each of their counters that has not reached its value. It may
        also be ahead of it.
        """
        return [
            self._group.ranks[each.rank]
            for each in self._awaited()
            if 0 < (each.value - self._counters[each.counter]) & WRAP < _LIFT
        ]

    def _wait(self) -> AwaitedRanks | None:
        """Return for which other ranks the streams of this one wait."""
        missing = sorted({*self._missing()} - {self._rank})
        if not missing:
            return None
        text = f"copies of rows from rank {' and rank '.join(map(str, missing))}"
        return text, tuple(missing)

    def _reason(self, still: float) -> str:
        """Return why the copies have failed, or an empty text; no counter has changed for ``still``
        seconds.
        """
        if self._counters[PeerCounters.failed]:
            return self._failed_elsewhere()
        if failure := self._observer.failure:
            return failure
        ranks, own = self._group.ranks, self._group.rank
        left = [rank for i, rank in enumerate(ranks) if self._counters[self._counters.left(i)]]
        if left and still > _PATIENCE:
            return (
                f"Rank {left[0]} has ended its run while ranks {ranks} copy rows from each"
                " other. Look at its output."
            )
        limit = min(self._timeout, _PATIENCE_AT_THE_END) if self._is_leaving else self._timeout
        # The device of this rank itself may hang.
        missing = [rank for rank in self._missing() if rank != ranks[own]] or self._missing()
        if missing and still > limit:
            return (
                f"Rank {ranks[own]} has waited {limit:g} s for rank {missing[0]}, to copy"
                f" rows between ranks {ranks}. All of them must run the same layers: look"
                f" at the output of rank {missing[0]}."
            )
        return ""

    def _tell(self) -> None:
        logger.error("bmt: what rank %d computes now is wrong. %s", self._rank, self._failure)
        self._observer.fail(self._failure)

    def _lift(self) -> None:
        """Raise the counters so that no stream waits. Repeated, because a stream that goes on
        writes its counters again.
        """
        for index in range(self._counters.first, len(self._seen)):
            self._counters[index] = self._seen[index] + _LIFT

    def _failed_elsewhere(self) -> str:
        return (
            f"Copying rows between ranks {self._group.ranks} has failed on another rank."
            " Look at its output."
        )
