"""``CallWatch``: a thread that writes this rank's calls to the store, and finds out why a call does
not end.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable

import torch.distributed as dist

from bmt_core.comm.rank_states import (
    Call,
    RankState,
    missing_ranks,
    name_of_rank,
    ring_of_waits,
)
from bmt_core.errors import CallError

logger = logging.getLogger("bmt_core")

PERIOD = 1.0
"""Seconds between two writes of a rank's state."""
LOOK_AFTER = 2.0
"""Seconds for which a rank waits before it reads the others' states."""
LONGEST_SILENCE = 3.5 * PERIOD
"""Seconds after which a rank without a new state, or a store without an answer, has failed or is
stopped.
"""
WARN_AFTER = 30.0
"""Seconds for which a rank waits before it warns and names the missing ranks."""
_SILENCE = (
    "Nothing was heard of {} for {:.0f} s: its process, its host or the network between has failed,"
    " or it is stopped."
)
_PATIENCE = 7.0  # seconds to find out which rank is dead
_READERS_PATIENCE = 3.0  # seconds for which the rank that serves the store waits for its readers
_STACKS, _FRAMES = 2, 12  # of so many missing ranks a message shows so many innermost calls
_FAILURE, _FAREWELL = "failure", "farewell"
_ADVICE = (
    "All ranks of a group must make the same calls in the same order. Look for what only some ranks"
    " do, such as save(), state_dict(), print(weight) or a forward behind `if rank() == 0`."
)


class CallWatch:
    """Watches the calls of this rank and the others: see [Note: how calls are checked].

    ``store`` is used by the thread alone. ``server`` is the host that serves it, and
    ``serves_store`` says whether it ends with this process.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, server: str, serves_store: bool
    ) -> None:
        self.rank = rank
        self.failure: str | None = None
        """The first failure of the run, the same on every rank; None while there is none. After it
        every call raises.
        """
        self.store_is_gone = False
        """Whether the rank that served the store has left, so that calls cannot be compared
        any more.
        """
        self.entered: dict[str, int] = {}
        self.last: Call | None = None
        self.waiting: tuple[Call, float] | None = None
        """The call for whose end this rank waits, and since when."""
        self._store = store
        self._others = [other for other in range(world_size) if other != rank]
        self._world_size = world_size
        self._server = server
        self._serves_store = serves_store
        self._host = socket.gethostname()
        self._beat = 0
        self._answered = time.monotonic()  # when the store answered last
        self._failure_is_known = threading.Event()
        self._wake = threading.Event()
        self._is_stopping = False
        self._connection_is_lost = False
        self._has_read_failure = False
        self._warned_of: Call | None = None
        self._ring: tuple[tuple[Call | None, ...], dict[int, int]] | None = None
        self._heard: dict[int, tuple[int, float]] = {}  # since a connection was lost
        self._heard_in_looks: dict[int, tuple[int, float]] = {}
        self._next_look = 0.0
        self._missing = ""
        self._told: Call | None = None
        self._tell()
        self._thread = threading.Thread(target=self._run, name="bmt-call-watch", daemon=True)
        self._thread.start()

    def raise_failure(self, call: Call | str | None = None) -> None:
        """Raise :class:`CallError` if the calls of the run have failed, here or elsewhere. ``call``
        is what this rank is in.
        """
        if self.failure is not None:
            where = "" if call is None else f" This is rank {self.rank}, in {call}."
            raise CallError(self.failure + where)

    def fail(self, failure: str, store: dist.Store | None = None) -> None:
        """Make the calls of all ranks fail; the first failure is kept. Other threads pass a
        ``store`` of their own.
        """
        own = self._store if store is None else store
        try:
            failure = own.compare_set(_FAILURE, "", failure).decode()
        except dist.DistError:
            # Whoever served the store has left, and the others learn it from their connections.
            pass
        self.failure = failure
        self._failure_is_known.set()

    def error_of_lost_connection(self, call: Call | str, error: Exception) -> CallError:
        """Return the error for a ``call`` that gloo or NCCL ended with ``error``. It names the rank
        that is gone.

        Waits some seconds until the watch has found that rank.
        """
        self._connection_is_lost = True
        self._wake.set()
        self._failure_is_known.wait(_PATIENCE)
        guess = (
            f"The connection to another rank is lost ({error}). Look at the output of all ranks."
        )
        if self.store_is_gone:
            guess = "Rank 0 has ended, or the launcher: the store that it served is gone."
        guess = self._silence_of_server() or guess
        why = self.failure or guess
        return CallError(f"{why} This is rank {self.rank}, in {call}.")

    def error_of_timeout(self, call: Call | str, timeout: float) -> CallError:
        """Return the error for a ``call`` in which this rank has waited ``timeout`` seconds."""
        why = self._missing or "Look at the output of the other ranks."
        why = self._silence_of_server() or why
        return CallError(f"Rank {self.rank} has waited {timeout:g} s in {call}. {why}")

    def _silence_of_server(self) -> str:
        """Return an error's sentence if whoever serves the store has been silent for long."""
        silence = time.monotonic() - self._answered
        server = f"rank 0 on {self._server}, or of the launcher there,"
        return _SILENCE.format(server, silence) if silence >= LONGEST_SILENCE else ""

    def close(self, ended: str = "") -> None:
        """Tell the others that this rank leaves; ``ended`` is the error that ends it, if there
        is one.

        The rank that serves the store waits a moment until the others have read this. Otherwise
        they would miss it, and torch would print long messages about a lost store.
        """
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        if self.store_is_gone or (self._has_read_failure and not self._serves_store):
            return
        try:
            self._beat += 1
            self._tell(ended)
            if ended and self.failure is None:
                self.fail(f"Rank {self.rank} has failed ({ended}).")
            if self._serves_store:
                self._store.set(_FAREWELL, "")
                self._wait_for_readers()
            else:
                self._store.set(self._seen(self.rank), "")
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot tell that it leaves: %s", self.rank, error)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wake.wait(PERIOD / 4 if self._connection_is_lost else PERIOD)
                self._wake.clear()
                if not self._is_stopping and not self._tick():
                    return
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot reach the store any more: %s", self.rank, error)
            self.store_is_gone = True
            self._failure_is_known.set()

    def _tick(self) -> bool:
        """Write this rank's state and look for failures. Return False if the thread is to end."""
        self._beat += 1
        waiting = self.waiting
        self._tell()
        if self._store.check([_FAILURE]):
            self._learn(self._store.get(_FAILURE).decode())
            return False
        if not self._serves_store and self._store.check([_FAREWELL]):
            self._store.set(self._seen(self.rank), "")
            self._answered = float("inf")  # it will answer no more, and has said so
            self.store_is_gone = True
            self._failure_is_known.set()
            return False
        now = time.monotonic()
        if self._connection_is_lost:
            self._look_for_the_dead()
        elif waiting is not None and now - waiting[1] >= LOOK_AFTER and now >= self._next_look:
            # Every waiting rank reads the states of all ranks: with many ranks, less often.
            self._next_look = now + self._world_size / 64
            self._look(waiting[0], now - waiting[1])
        self._answered = now
        return True

    def _tell(self, ended: str | None = None) -> None:
        # ``waiting`` is read before ``entered``, so that a call entered in between is not reported
        # as waiting but not entered.
        waiting = None if self.waiting is None else self.waiting[0]
        last = self.last
        has_made_no_call = self._beat > 0 and waiting is None and last is self._told
        self._told = last
        state = RankState(
            beat=self._beat,
            entered=dict(self.entered),
            last=last,
            waiting=waiting,
            stack=_stack_of_program() if has_made_no_call and ended is None else "",
            ended=ended,
            host=self._host,
        )
        self._store.set(f"state/{self.rank}", state.to_json())

    def _learn(self, failure: str) -> None:
        self._store.set(self._seen(self.rank), "")
        self._has_read_failure = True
        if self.failure is None:
            self.failure = failure
            if self.waiting is None and not self._connection_is_lost:
                # The next call raises it. But the program may be waiting for a device, and then no
                # error can be raised.
                logger.warning("bmt: rank %d cannot go on. %s", self.rank, failure)
        self._failure_is_known.set()

    def _look(self, call: Call, seconds: float) -> None:
        states = self._states(range(self._world_size))
        missing = missing_ranks(call, states)
        for rank in missing:
            if states[rank].ended is not None:
                self.fail(
                    f"Rank {rank} has ended{_because(states[rank])}, and rank {self.rank} waits for"
                    f" it in {call}."
                )
                return
        ring = ring_of_waits(self.rank, states)
        if ring and self._is_confirmed(ring, states):
            self.fail(_ring_text(ring, states))
            return
        absent = "; ".join(
            f"{name_of_rank(rank, states)}, {_whereabouts(states[rank])}" for rank in missing
        )
        stacks = "".join(_stack_in_words(rank, states[rank]) for rank in missing[:_STACKS])
        silent = "".join(
            f" {_SILENCE.format(name_of_rank(rank, states), silence)}"
            for rank, silence in self._silences(states, self._heard_in_looks).items()
            if rank in call.ranks
        )
        waits_for = f"It waits for {absent}." if missing else ""
        self._missing = f"{waits_for}{silent}{stacks}".lstrip()
        if seconds >= WARN_AFTER and self._warned_of != call and self._missing:
            self._warned_of = call
            logger.warning(
                "bmt: rank %d has waited %.0f s in %s. %s", self.rank, seconds, call, self._missing
            )

    def _is_confirmed(self, ring: list[int], states: dict[int, RankState]) -> bool:
        """Whether every rank of ``ring`` has written twice, since the ring was first seen, that it
        still waits there.
        """
        waits = tuple(states[rank].waiting for rank in sorted(ring))
        beats = {rank: states[rank].beat for rank in ring}
        if self._ring is None or self._ring[0] != waits:
            self._ring = waits, beats
            return False
        return all(beat >= self._ring[1][rank] + 2 for rank, beat in beats.items())

    def _look_for_the_dead(self) -> None:
        states = self._states(range(self._world_size))
        for rank in self._others:
            state = states[rank]
            if state.ended is not None:
                self.fail(f"Rank {rank} has ended{_because(state)}, and others still wait for it.")
                return
        silent = self._silences(states, self._heard)
        if silent:
            dead = " and ".join(
                f"{name_of_rank(rank, states)}, {_whereabouts(states[rank])}," for rank in silent
            )
            self.fail(
                f"The process of {dead} was killed or has crashed: it ended without saying so."
            )

    def _silences(
        self, states: dict[int, RankState], heard: dict[int, tuple[int, float]]
    ) -> dict[int, float]:
        """Return for how many seconds the watches of other ranks have written nothing, if that is
        too long for a rank that runs. ``heard`` keeps their last beats, and when each was new.
        """
        now = time.monotonic()
        for rank in self._others:
            if rank not in heard or heard[rank][0] != states[rank].beat:
                heard[rank] = states[rank].beat, now
        silences = {rank: now - since for rank, (_, since) in heard.items()}
        return {rank: silence for rank, silence in silences.items() if silence >= LONGEST_SILENCE}

    def _states(self, ranks: Iterable[int]) -> dict[int, RankState]:
        ranks = list(ranks)
        found = self._store.multi_get([f"state/{rank}" for rank in ranks])
        return {rank: RankState.from_json(text) for rank, text in zip(ranks, found, strict=True)}

    def _wait_for_readers(self) -> None:
        end = time.monotonic() + _READERS_PATIENCE
        keys = [self._seen(other) for other in self._others]
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(0.02)

    def _seen(self, rank: int) -> str:
        return f"seen/{rank}"


def _stack_of_program() -> str:
    """Return the innermost calls of the main thread, as a traceback shows them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=_FRAMES)).rstrip()


def _stack_in_words(rank: int, state: RankState) -> str:
    return (
        f"\nRank {rank} is now here (most recent call last):\n{state.stack}" if state.stack else ""
    )


def _because(state: RankState) -> str:
    return f" ({state.ended})" if state.ended else ""


def _whereabouts(state: RankState) -> str:
    if state.waiting is not None:
        return f"which is in {state.waiting}"
    return (
        "which has entered no call yet"
        if state.last is None
        else f"whose last call was {state.last}"
    )


def _ring_text(ring: list[int], states: dict[int, RankState]) -> str:
    waits = "; ".join(
        (
            f"rank {rank} is in {states[rank].waiting}, which rank {ring[(index + 1) % len(ring)]}"
            " has not entered"
        )
        for index, rank in enumerate(ring)
    )
    return f"Ranks wait for each other in different calls: {waits}. {_ADVICE}"


def mismatch_text(call: Call, rank: int, first_rank: int, first_text: str) -> str:
    """Return the failure of ``rank``, which has entered ``call`` where ``first_rank`` had entered
    another one.
    """
    return (
        f"Ranks have entered different calls: rank {rank} is in {call}, and the same call of rank"
        f" {first_rank} is: {first_text}. {_ADVICE}"
    )
