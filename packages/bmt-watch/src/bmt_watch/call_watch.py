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
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from bmt_core.comm.annotate import PLACES
from bmt_core.comm.observer import Awaited, ObserverContext
from bmt_core.errors import CallError, cause_of
from bmt_watch.call_log import CallLog
from bmt_watch.explanation import (
    ADVICE,
    SILENCE,
    Findings,
    StuckCalls,
    calls_key,
    state_key,
)
from bmt_watch.rank_states import Call, RankState
from bmt_watch.run_end import END, FAREWELL, RunEnd, and_place

logger = logging.getLogger("bmt_core")

PERIOD = 1.0
"""Seconds between two writes of a rank's state, with at most :data:`_RANKS_OF_A_STORE` ranks."""
LOOK_AFTER = 2.0
"""Seconds for which a rank waits before it asks for a look at all ranks, as with PERIOD."""
WARN_AFTER = 30.0
"""Seconds for which a rank waits before it warns and names the missing ranks."""
SILENT_PERIODS = 3.5
"""After so many periods without a sign of life, a rank has failed or is stopped."""
# With more ranks the period grows: at most five requests of each in it, and with those of torch's
# monitors of NCCL fewer than 2,000 a second.
_RANKS_OF_A_STORE = 350
_PATIENCE = 8.0  # periods to find out which rank is dead
_READERS_PATIENCE = 3.0  # periods for which the rank that serves the store waits for its readers
# A watch that learns of a failure ends the meeting of its rank so many periods later, when all
# others know of the failure, or have not heard of the store for as long.
_BEFORE_A_MEETING_ENDS = 2.0
_FRAMES = 12  # innermost calls of a stack
_WANTED, _FOUND = "wanted", "found"
MET, _FAILED = "met", "failed"  # how a meeting of a group's members has ended


class CallWatch:
    """Watches the calls of this rank, which are in ``log``, and the others: see
    [Note: how calls are checked].

    ``store`` is used by the thread alone.
    """

    def __init__(
        self, context: ObserverContext, store: dist.Store, log: CallLog, end: RunEnd
    ) -> None:
        self.log, self.end = log, end
        self.period = period_of(context.world_size)
        """Seconds between two writes of this rank's state."""
        self.longest_silence = SILENT_PERIODS * self.period
        """Seconds after which a rank without a new state, or a store without an answer, has failed
        or is stopped.
        """
        self.waits: list[Callable[[], Awaited | None]] = []
        """Each returns for what the GPU has waited for some time; None if it waits for nothing."""
        self._store, self._rank, self._context = store, end.rank, context
        self._looks = _Looks(store, end.rank, context.world_size, self.period)
        self._beat = 0
        self._went_on = float("-inf")  # when this rank asked for a failure last, and there was none
        self._answered = time.monotonic()  # when the store answered last
        self._began = self._answered  # when the thread asked it last
        self._is_stopping = False
        self._connection_is_lost = False
        self._has_read_failure = False
        self._warned_of: Call | None = None
        self._shown: object = None  # what showed that the calls that others have seen are old
        self._times_shown = 0
        self._on_device: tuple[Call, ...] = ()  # the last calls of the GPU, in which it may wait
        self._told: tuple[Call | None, list[Call]] = None, []  # the last calls
        self._told_at = time.monotonic()  # when they were new
        self._missing = ""
        self._tell()
        self._thread = threading.Thread(target=self._run, name="bmt-call-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def knows_that_calls_go_on(self, since: float | None = None) -> bool:
        """Return whether this rank has asked for a failure so lately that no watch can have ended a
        meeting because of one. ``since`` is when, by default when there was none.
        """
        asked = self._went_on if since is None else since
        return time.monotonic() - asked < _BEFORE_A_MEETING_ENDS * self.period

    @property
    def waits_for_store(self) -> bool:
        """Whether this rank has asked the store, and the answer has not come for too long."""
        is_late = time.monotonic() - self._began >= self.longest_silence
        return self._began > self._answered and is_late

    def known_failure(self) -> str | None:
        """Return the failure of the run, as soon as this rank's watch knows it; None if it does not
        learn of one for some seconds.
        """
        self.end.wake.set()
        self.end.is_known.wait(_PATIENCE * self.period)
        return self.end.failure

    def error_of_lost_connection(self, call: Call | str, error: Exception) -> CallError:
        """Return the error for a ``call`` that gloo or NCCL ended with ``error``. It names the rank
        that is gone.

        Waits some seconds until the watch has found that rank.
        """
        self._connection_is_lost = True
        guess = (
            f"The connection to another rank is lost ({cause_of(error)}). Look at the output of all"
            " ranks."
        )
        failure = self.known_failure()
        if self.end.store_is_gone:
            guess = "Rank 0 has ended, or the launcher: the store that it served is gone."
        return self.end.error_in(call, failure or self._silence_of_server() or guess)

    def error_of_timeout(self, call: Call | str, timeout: float) -> CallError:
        """Return the error for a ``call`` in which this rank has waited ``timeout`` seconds: the
        failure of the run, if it is known by now.
        """
        if self.end.failure is not None:
            return self.end.error_in(call, self.end.failure)
        why = self._silence_of_server() or self._missing or "Look at the output of all ranks."
        where = and_place(call)
        return CallError(f"Rank {self._rank} has waited {timeout:g} s in {where}. {why}")

    def _silence_of_server(self) -> str:
        """Return an error's sentence if whoever serves the store has been silent for long."""
        silence = time.monotonic() - self._answered
        server = f"rank 0 on {self._context.server}, or of the launcher there,"
        return SILENCE.format(server, silence) if silence >= self.longest_silence else ""

    def close(self, ended: str) -> None:
        """Tell the others that this rank leaves; ``ended`` is the error that ends it, if there
        is one.

        The rank that serves the store waits a moment until the others have read this. Otherwise
        they would miss it, and torch would print long messages about a lost store.
        """
        self._is_stopping = True
        self.end.wake.set()
        self._thread.join()
        end, serves_store = self.end, self._rank == self._context.server_rank
        if ended or end.failure is not None:
            end.end_on_device(end.failure or ended)  # if the thread has not
        self._beat += 1
        is_told = end.store_is_gone or (self._has_read_failure and not serves_store)
        try:
            self._tell(ended, only_in_log=is_told)
            if is_told:
                return
            if ended and end.failure is None:
                end.fail_because_of(ended, self._store)
            if serves_store:
                self._store.compare_set(END, "", FAREWELL)
                self._wait_for_readers()
            else:
                self._store.set(f"seen/{self._rank}", "")
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot tell that it leaves: %s", self._rank, error)

    def _run(self) -> None:
        end = self.end
        try:
            while not self._is_stopping:
                hurries = self._connection_is_lost or self._looks.stuck_calls.has_lost_connections
                end.wake.wait(self.period / 4 if hurries else self.period)
                end.wake.clear()
                if not self._is_stopping and not self.tick():
                    return
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot reach the store any more: %s", self._rank, error)
            end.store_is_gone = True
            # A rank that serves the store waits before it leaves until others have read so; this
            # thread may have been held up for longer.
            was_late = self._began - self._answered > _READERS_PATIENCE * self.period
            is_lost = self._context.server_rank is not None and not (was_late or self._is_stopping)
            if is_lost and self._on_device and end.failure is None:
                # Gloo would tell of it, but NCCL may wait for its timeout.
                end.failure = (
                    f"The process of rank {self._context.server_rank} was killed or has crashed, or"
                    " cannot be reached: it served the store, and has not said that it leaves. Look"
                    " at its output."
                )
            end.is_known.set()
            if end.failure is not None:
                end.end_on_device(end.failure)

    def tick(self) -> bool:
        """Write this rank's state and look for failures. Return False if the thread is to end."""
        self._beat += 1
        log, self._began = self.log, time.monotonic()
        waiting = log.waiting
        seconds = 0.0 if waiting is None else self._began - waiting[1]
        look_after = LOOK_AFTER * self.period / PERIOD
        is_stuck = self._connection_is_lost or seconds >= look_after or log.given_up[0] != ""
        self._tell(is_stuck=is_stuck)
        if self._store.check([END]):
            self._learn(self._store.get(END).decode())
            return False
        self._went_on = self._began
        self._looks.ask(is_stuck)
        if not is_stuck and self._is_idle(log.waiting):
            self._looks.ask_of_device(self._on_device, self._told_at)
        if (failure := self._looks.look_if_wanted()) is not None:
            self.end.fail(failure, self._store)
        self._missing = "" if waiting is None else self._looks.found.of(waiting[0])
        if self._missing and waiting and seconds >= WARN_AFTER and self._warned_of != waiting[0]:
            self._warned_of = call = waiting[0]
            logger.warning(
                "bmt: rank %d has waited %.0f s in %s. %s", self._rank, seconds, call, self._missing
            )
        self._answered = time.monotonic()
        return True

    def _tell(
        self, ended: str | None = None, *, is_stuck: bool = False, only_in_log: bool = False
    ) -> None:
        """Write the state of this rank, and show its calls if it ``is_stuck``, or its GPU idle."""
        log, now = self.log, time.monotonic()
        # ``waiting`` is read before ``entered``, so that a call entered in between is not reported
        # as waiting but not entered.
        record, (waiting, begin) = log.serial, log.waiting or (None, now)
        on_device, last = log.last_on_device(), log.last
        waits = [awaited for wait in self.waits if (awaited := wait()) is not None]
        self._on_device = *on_device, *(Call(text, ranks, 0, text) for text, ranks in waits)
        is_in_call, calls = waiting is not None and waiting.number > 0, (last, on_device)
        has_made_no_call = self._beat > 0 and not is_in_call and last is self._told[0]
        if calls != self._told:
            self._told, self._told_at = calls, now
        is_idle = self._is_idle(waiting)
        shown = (waiting, last) if is_stuck else self._told_at if is_idle else self._shown
        is_new, self._shown = shown != self._shown, shown
        self._times_shown += is_new
        state = RankState(
            beat=self._beat,
            time=time.time(),
            record=max(record, waiting.record if waiting else 0),
            entered=log.entered(),
            last=last,
            waiting=waiting,
            waited=now - begin,
            under_way=log.calls_under_way() if is_new else (),
            on_device=self._on_device,
            is_idle=is_idle,
            shown=self._times_shown,
            stack=_stack_of_program() if has_made_no_call and ended is None else "",
            place=PLACES.now,
            step=log.step,
            training_step=log.training_step,
            seconds=now - self._told_at,
            given_up=log.given_up[0],
            stays_with=log.given_up[1],
            ended=ended,
            is_cut_off=self._connection_is_lost,
            host=socket.gethostname(),
        )
        log.write_state(state)
        if only_in_log:
            return
        if is_new:
            shows: Any = zlib.compress(log.to_bytes())  # torch's stub knows of str alone
            self._store.set(calls_key(self._rank), shows)
        self._store.set(state_key(self._rank), state.to_json())

    def _is_idle(self, waiting: object) -> bool:
        """Return whether the GPU may wait in a call: no call has followed for long."""
        since = time.monotonic() - self._told_at
        return bool(self._on_device) and waiting is None and since >= WARN_AFTER

    def _learn(self, first: str) -> None:
        self._store.set(f"seen/{self._rank}", "")
        end, log = self.end, self.log
        if first == FAREWELL:
            self._answered = float("inf")  # the store answers no more, and has said so
            end.store_is_gone = True
            end.is_known.set()
            return
        # It asks no more, and must not count as waiting for the store.
        self._has_read_failure, self._answered = True, time.monotonic()
        if end.failure is None:
            end.failure = first
            can_raise = log.meeting is not None or log.interrupt is not None
            if not can_raise and not self._connection_is_lost:
                # The next call raises it. But the program may be waiting for a device, or for a
                # backend that cannot be interrupted, and then no error can be raised.
                logger.warning("bmt: rank %d cannot go on. %s", self._rank, first)
        end.is_known.set()
        learned = time.monotonic()
        while (meeting := log.meeting) is not None and self.knows_that_calls_go_on(learned):
            time.sleep(0.02)
        if meeting is not None:
            self._store.compare_set(meeting, "", _FAILED)
        interrupt = log.interrupt  # which the main thread may take away meanwhile
        if interrupt is not None:
            interrupt()
        end.end_on_device(end.failure)

    def _wait_for_readers(self) -> None:
        patience_ends = time.monotonic() + _READERS_PATIENCE * self.period
        keys = [f"seen/{other}" for other in range(self._context.world_size) if other != self._rank]
        while not self._store.check(keys) and time.monotonic() < patience_ends:
            time.sleep(0.02)


class _Looks:
    """The looks at all ranks for which this one asks, or which it makes itself, as rank 0 does.
    ``found`` is what the last one has found.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, period: float) -> None:
        self.found = Findings()
        self._store = store
        self.stuck_calls = StuckCalls(store, world_size, SILENT_PERIODS * period)
        self._is_looking = rank == 0
        # If rank 0 has stopped to look, one of the others begins: the next rank first, and then the
        # others hear of its looks.
        self._patience = SILENT_PERIODS * period + (rank - 1) * period / 4
        self._wanted = 0
        self._rank, self._asked = rank, time.monotonic()  # of calls of the GPU
        self._found_before = 0  # the number of the last look before this rank became idle
        self._warned: tuple[float, bool, Call | None] | None = None
        self._heard = 0.0  # when, while this rank is stuck
        if self._is_looking:
            self._store.set(_FOUND, self.found.to_json())

    def read(self) -> Findings:
        """Read what the last look has found."""
        self.found = Findings.from_json(self._store.get(_FOUND))
        return self.found

    def ask(self, is_stuck: bool) -> None:
        """Ask for a look if this rank ``is_stuck``, and begin to look if nobody does."""
        if not is_stuck:
            self._heard = 0.0
            return
        now, before = time.monotonic(), self.found.number
        self._store.add(_WANTED, 1)
        if self.read().number != before or not self._heard:
            self._heard = now
        self._is_looking = self._is_looking or now - self._heard >= self._patience

    def look_if_wanted(self) -> str | None:
        """Look at all ranks, if this one is to and some rank has asked. Return the failure of the
        run that this shows.
        """
        wanted = self._store.add(_WANTED, 0) if self._is_looking else self._wanted
        if wanted == self._wanted:
            return None
        self._wanted = wanted
        self.found = self.stuck_calls.look()
        self._store.set(_FOUND, self.found.to_json())
        return self.found.failure

    def ask_of_device(self, calls: Iterable[Call], since: float) -> None:
        """Ask now and then for a look, since no call has followed the last ``calls`` of the GPU.
        Warn of a call that differs, and of one that some rank has not entered.
        """
        found, now = self.read(), time.monotonic()
        if self._asked < since:  # what was found before is of other calls
            self._asked, self._found_before = 0.0, found.number
        if now - self._asked >= WARN_AFTER:
            self._asked = now
            self._store.add(_WANTED, 1)
        # Of several, the first: the GPU may not have come to the others.
        call = next((call for call in calls if found.of(call)), None)
        difference = found.difference if found.number > self._found_before else ""
        shown = since, difference != "", call
        if shown[1:] == (False, None) or shown == self._warned:
            return
        self._warned = shown
        texts = [f"bmt: rank {self._rank} has made no call for {now - since:.0f} s."]
        if difference:
            texts.append(f"Ranks have entered different calls: {difference}. {ADVICE}")
        if call is not None:
            texts.append(f"Its GPU may wait in {call}. {found.of(call)}")
        logger.warning("%s", " ".join(texts))


def period_of(world_size: int) -> float:
    """Return after how many seconds each of ``world_size`` ranks writes its state."""
    return PERIOD * max(1.0, world_size / _RANKS_OF_A_STORE)


def _stack_of_program() -> str:
    """Return the innermost calls of the main thread, as a traceback shows them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=_FRAMES)).rstrip()
