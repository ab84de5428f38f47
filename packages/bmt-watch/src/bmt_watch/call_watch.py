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
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bmt_core.comm.annotate import PLACES
from bmt_core.errors import CallError, cause_of
from bmt_watch.call_history import CallHistory
from bmt_watch.device_calls import DeviceCalls, to_bytes
from bmt_watch.rank_states import Call, RankState, after_comma
from bmt_watch.recent_calls import RecentCalls
from bmt_watch.stuck_calls import (
    ADVICE,
    SILENCE,
    Findings,
    StuckCalls,
    queued_key,
    recent_key,
    state_key,
)

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
# The first failure of the run, or the farewell of the rank that served the store.
_END, _FAREWELL = "end", "farewell"
_WANTED, _FOUND = "wanted", "found"
MET, _FAILED = "met", "failed"  # how a meeting of a group's members has ended


class CallWatch:
    """Watches the calls of this rank and the others: see [Note: how calls are checked].

    ``store`` is used by the thread alone. ``server`` is the host that serves it, ``server_rank``
    the rank whose process does; None if that is the launcher. ``history`` gets the signs of life of
    this rank, too.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        server: str,
        server_rank: int | None,
        history: CallHistory | None = None,
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
        self.on_device: list[DeviceCalls] = []
        """The last calls of each group that were queued on the GPU and not waited for."""
        self.recent = RecentCalls()
        self.interrupt: Callable[[], None] | None = None
        """Ends the wait for a send or receive, by an error, if the main thread is in one."""
        self.step = 0
        """The number of a pipeline's present step."""
        self.training_step = 1
        """The number of the present step of the first optimizer that is stepped."""
        self.has_several_hosts = False
        """Whether the run has ranks on other hosts, so that this rank's failure names its host."""
        self.given_up: tuple[str, tuple[int, ...]] = "", ()
        """The error for which this rank makes no more calls in its present step, but those with the
        group of these ranks.
        """
        self.on_failure: list[Callable[[str], None]] = []
        """Called with the failure of the run, on the watch's thread: they end what this rank's GPU
        waits for.
        """
        self.waits_of_copies: list[Callable[[], Call | None]] = []
        """Each returns for which ranks the GPU has waited for some time, to copy from their memory;
        None if it waits for none.
        """
        self.meeting: str | None = None
        """The key of the store for which the main thread waits, until all members of a group have
        entered a call.
        """
        self.period = period_of(world_size)
        """Seconds between two writes of this rank's state."""
        self.look_after = LOOK_AFTER * self.period / PERIOD
        """Seconds for which this rank waits before it asks for a look at all ranks."""
        self.longest_silence = SILENT_PERIODS * self.period
        """Seconds after which a rank without a new state, or a store without an answer, has failed
        or is stopped.
        """
        self._store = store
        self._others = [other for other in range(world_size) if other != rank]
        self._server = server
        self._server_rank = server_rank
        self._serves_store = rank == server_rank
        self._history = history
        self._host = socket.gethostname()
        self._beat = 0
        self._went_on = float("-inf")  # when this rank asked for a failure last, and there was none
        self._answered = time.monotonic()  # when the store answered last
        self._began = self._answered  # when the thread asked it last
        self._failure_is_known = threading.Event()
        self._wake = threading.Event()
        self._is_stopping = False
        self._connection_is_lost = False
        self._has_read_failure = False
        self._warned_of: Call | None = None
        self._warned_on_device: tuple[float, bool, Call | None] | None = None
        self._counted = 0  # the first optimizer that is stepped
        self._shows_recent: object = None  # the waiting and the last call when they were shown
        self._told: tuple[Call | None, tuple[Call, ...]] = None, ()  # the last calls
        self._told_at = time.monotonic()  # when they were new
        self._on_device: tuple[Call, ...] = ()
        self._moved = self._asked = time.monotonic()  # when a call was queued on the GPU last
        self._shown = 0, 0.0  # how often the calls on the GPU were shown, and those of when
        self._found_before = 0  # the number of the last look before this rank became idle
        self._looks = rank == 0
        self._stuck_calls = StuckCalls(store, world_size, self.longest_silence)
        self._wanted = 0
        self._found = Findings()
        self._heard_of_looks = 0.0  # when, while this rank is stuck
        self._missing = ""
        self._tell()
        if self._looks:
            self._store.set(_FOUND, self._found.to_json())
        self._thread = threading.Thread(target=self._run, name="bmt-call-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def raise_failure(self, call: Call | str | None = None) -> None:
        """Raise :class:`CallError` if the calls of the run have failed, here or elsewhere. ``call``
        is what this rank is in.
        """
        if self.failure is not None:
            raise CallError(self.failure) if call is None else self.error_in(call, self.failure)

    @property
    def knows_that_calls_go_on(self) -> bool:
        """Whether this rank has asked for a failure so lately that no watch can have ended a
        meeting because of one.
        """
        return self._may_believe_in_calls(self._went_on)

    def _may_believe_in_calls(self, since: float) -> bool:
        return time.monotonic() - since < _BEFORE_A_MEETING_ENDS * self.period

    def raise_known_failure(self, call: Call) -> None:
        """Raise a failure that some rank has found, as soon as this rank's watch knows it."""
        self.known_failure()
        self.raise_failure(call)
        raise self.error_in(
            call, "The calls of the run have failed. Look at the output of all ranks."
        )

    def known_failure(self) -> str | None:
        """Return the failure of the run, as soon as this rank's watch knows it; None if it does not
        learn of one for some seconds.
        """
        self._failure_is_known.wait(_PATIENCE * self.period)
        return self.failure

    def error_in(self, call: Call | str, why: str) -> CallError:
        """Return the error ``why``, and which rank this is, in which ``call``, and where in the
        model, unless ``why`` names the call.
        """
        where = "" if str(call) in why else f", in {self._and_place(call)}"
        return CallError(f"{why} This is rank {self.rank}{where}.")

    def _and_place(self, call: Call | str) -> str:
        place = PLACES.now.text
        return call.on_rank_at(place) if isinstance(call, Call) else f"{call}{after_comma(place)}"

    def fail(self, failure: str, store: dist.Store | None = None) -> None:
        """Make the calls of all ranks fail; the first failure is kept. Other threads pass a
        ``store`` of their own.
        """
        own = self._store if store is None else store
        try:
            first = own.compare_set(_END, "", failure).decode()
            failure = failure if first == _FAREWELL else first
        except dist.DistError:
            # Whoever served the store has left, and the others learn it from their connections.
            pass
        self.failure = failure
        self._failure_is_known.set()
        self._wake.set()

    def fail_because_of(self, ended: str, store: dist.Store | None = None) -> None:
        """Make the calls of all ranks fail, because the error ``ended`` ends this one."""
        host = f" on {self._host}" if self.has_several_hosts else ""
        where = after_comma(PLACES.now.text)
        self.fail(f"Rank {self.rank}{host} has failed ({ended}){where}.", store)

    def error_of_lost_connection(self, call: Call | str, error: Exception) -> CallError:
        """Return the error for a ``call`` that gloo or NCCL ended with ``error``. It names the rank
        that is gone.

        Waits some seconds until the watch has found that rank.
        """
        self._connection_is_lost = True
        self._wake.set()
        self._failure_is_known.wait(_PATIENCE * self.period)
        guess = (
            f"The connection to another rank is lost ({cause_of(error)}). Look at the output of all"
            " ranks."
        )
        if self.store_is_gone:
            guess = "Rank 0 has ended, or the launcher: the store that it served is gone."
        why = self.failure or self._silence_of_server() or guess
        return self.error_in(call, why)

    def error_of_timeout(self, call: Call | str, timeout: float) -> CallError:
        """Return the error for a ``call`` in which this rank has waited ``timeout`` seconds: the
        failure of the run, if it is known by now.
        """
        if self.failure is not None:
            return self.error_in(call, self.failure)
        why = self._silence_of_server() or self._missing or "Look at the output of all ranks."
        where = self._and_place(call)
        return CallError(f"Rank {self.rank} has waited {timeout:g} s in {where}. {why}")

    @property
    def waits_for_store(self) -> bool:
        """Whether this rank has asked the store, and the answer has not come for too long."""
        is_late = time.monotonic() - self._began >= self.longest_silence
        return self._began > self._answered and is_late

    def _silence_of_server(self) -> str:
        """Return an error's sentence if whoever serves the store has been silent for long."""
        silence = time.monotonic() - self._answered
        server = f"rank 0 on {self._server}, or of the launcher there,"
        return SILENCE.format(server, silence) if silence >= self.longest_silence else ""

    def close(self, ended: str = "") -> None:
        """Tell the others that this rank leaves; ``ended`` is the error that ends it, if there
        is one.

        The rank that serves the store waits a moment until the others have read this. Otherwise
        they would miss it, and torch would print long messages about a lost store.
        """
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        if self._history is not None:
            self._history.close(ended)
        if ended or self.failure is not None:
            self._end_on_device(self.failure or ended)  # if the thread has not
        if self.store_is_gone or (self._has_read_failure and not self._serves_store):
            return
        try:
            self._beat += 1
            self._tell(ended)
            if ended and self.failure is None:
                self.fail_because_of(ended)
            if self._serves_store:
                self._store.compare_set(_END, "", _FAREWELL)
                self._wait_for_readers()
            else:
                self._store.set(f"seen/{self.rank}", "")
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot tell that it leaves: %s", self.rank, error)

    def end_of_step(self, optimizer: object, *_: object) -> None:
        """Count the steps of the first optimizer that is stepped. A hook of torch's optimizers."""
        self._counted = self._counted or id(optimizer)
        if id(optimizer) == self._counted:
            self.training_step += 1
            for calls in self.on_device:
                calls.begin_step(self.training_step)
        if self._history is not None:
            self._history.training_step = self.training_step

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                hurries = self._connection_is_lost or self._stuck_calls.has_lost_connections
                self._wake.wait(self.period / 4 if hurries else self.period)
                self._wake.clear()
                if not self._is_stopping and not self.tick():
                    return
        except dist.DistError as error:
            logger.debug("bmt: rank %d cannot reach the store any more: %s", self.rank, error)
            self.store_is_gone = True
            # A rank that serves the store waits before it leaves until others have read so; this
            # thread may have been held up for longer.
            was_late = self._began - self._answered > _READERS_PATIENCE * self.period
            is_lost = self._server_rank is not None and not (was_late or self._is_stopping)
            if is_lost and self._on_device and self.failure is None:
                # Gloo would tell of it, but NCCL may wait for its timeout.
                self.failure = (
                    f"The process of rank {self._server_rank} was killed or has crashed, or cannot"
                    " be reached: it served the store, and has not said that it leaves. Look at its"
                    " output."
                )
            self._failure_is_known.set()
            if self.failure is not None:
                self._end_on_device(self.failure)

    def tick(self) -> bool:
        """Write this rank's state and look for failures. Return False if the thread is to end."""
        self._beat += 1
        waiting, self._began = self.waiting, time.monotonic()
        seconds = 0.0 if waiting is None else self._began - waiting[1]
        is_stuck = self._connection_is_lost or seconds >= self.look_after or self.given_up[0] != ""
        if is_stuck and self._shows_recent != (waiting, self.last):
            recent = self.recent.to_json(waiting[0] if waiting else None, PLACES.passed())
            self._store.set(recent_key(self.rank), recent)
            self._shows_recent = waiting, self.last
        self._tell()
        if self._store.check([_END]):
            self._learn(self._store.get(_END).decode())
            return False
        self._went_on, now = self._began, time.monotonic()
        if is_stuck:
            self._store.add(_WANTED, 1)
            self._read_findings(now)
        else:
            self._heard_of_looks = 0.0
            if self._is_idle:
                self._ask_for_device(now)
        if self._looks:
            self._look_if_wanted()
        self._missing = "" if waiting is None else self._found.of(waiting[0])
        if waiting is not None and seconds >= WARN_AFTER and self._missing:
            self._warn(waiting[0], seconds)
        self._answered = time.monotonic()
        return True

    @property
    def _is_idle(self) -> bool:
        """Whether this rank's GPU may wait in a call: no call has followed for long."""
        since = time.monotonic() - self._moved
        return bool(self._on_device) and self.waiting is None and since >= WARN_AFTER

    def _look_at_device(self) -> None:
        for queued in self.on_device:
            queued.note_time()
        last = [
            *(each.last() for each in self.on_device),
            *(wait() for wait in self.waits_of_copies),
        ]
        calls = tuple(call for call in last if call is not None)
        if calls != self._on_device:
            self._on_device, self._moved = calls, time.monotonic()
        if self._is_idle and self._shown[1] != self._moved:
            data: Any = to_bytes(self.on_device)  # torch's stub knows of str alone
            self._store.set(queued_key(self.rank), data)
            self._shown = self._shown[0] + 1, self._moved

    def _ask_for_device(self, now: float) -> None:
        """Ask now and then for a look at all ranks. Warn of a call that differs, and of one that
        some rank has not entered.
        """
        self._found = Findings.from_json(self._store.get(_FOUND))
        if self._asked < self._moved:  # what was found before is of other calls
            self._asked, self._found_before = 0.0, self._found.number
        if now - self._asked >= WARN_AFTER:
            self._asked = now
            self._store.add(_WANTED, 1)
        # Of several, the first: the GPU may not have come to the others.
        call = next((call for call in self._on_device if self._found.of(call)), None)
        difference = self._found.difference if self._found.number > self._found_before else ""
        found = self._moved, difference != "", call
        if found[1:] == (False, None) or found == self._warned_on_device:
            return
        self._warned_on_device = found
        texts = [f"bmt: rank {self.rank} has made no call for {now - self._moved:.0f} s."]
        if difference:
            texts.append(f"Ranks have entered different calls: {difference}. {ADVICE}")
        if call is not None:
            texts.append(f"Its GPU may wait in {call}. {self._found.of(call)}")
        logger.warning("%s", " ".join(texts))

    def _read_findings(self, now: float) -> None:
        """Read what the last look has found. If rank 0 has stopped to look, one of the others
        begins.
        """
        found = Findings.from_json(self._store.get(_FOUND))
        if found.number != self._found.number or not self._heard_of_looks:
            self._heard_of_looks = now
        self._found = found
        # The next rank begins first, and then the others hear of its looks.
        patience = self.longest_silence + (self.rank - 1) * self.period / 4
        self._looks = self._looks or now - self._heard_of_looks >= patience

    def _look_if_wanted(self) -> None:
        wanted = self._store.add(_WANTED, 0)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._found = self._stuck_calls.look()
        if self._found.failure is not None:
            self.fail(self._found.failure)
        self._store.set(_FOUND, self._found.to_json())

    def _warn(self, call: Call, seconds: float) -> None:
        if self._warned_of != call:
            self._warned_of = call
            logger.warning(
                "bmt: rank %d has waited %.0f s in %s. %s", self.rank, seconds, call, self._missing
            )

    def _tell(self, ended: str | None = None) -> None:
        self._look_at_device()
        # ``waiting`` is read before ``entered``, so that a call entered in between is not reported
        # as waiting but not entered.
        waiting, begin = self.waiting or (None, 0.0)
        last, entered = self.last, dict(self.entered)
        for call in self._on_device:
            entered[call.group] = max(call.number, entered.get(call.group, 0))
        given_up, stays_with = self.given_up
        is_in_call = waiting is not None and waiting.number > 0
        has_made_no_call = self._beat > 0 and not is_in_call and last is self._told[0]
        calls = last, tuple(call for call in self._on_device if call.number > 0)
        if calls != self._told:
            self._told, self._told_at = calls, time.monotonic()
        stack = _stack_of_program() if has_made_no_call and ended is None else ""
        if self._history is not None and ended is None:
            since = time.time() - (time.monotonic() - begin)
            self._history.give_sign(0 if waiting is None else waiting.record, since, stack)
        state = RankState(
            beat=self._beat,
            entered=entered,
            last=last,
            waiting=waiting,
            since=begin,
            on_device=self._on_device,
            is_idle=self._is_idle,
            shown=self._shown[0],
            stack=stack,
            place=PLACES.now.text,
            step=self.step,
            training_step=self.training_step,
            seconds=time.monotonic() - self._told_at,
            given_up=given_up,
            stays_with=stays_with,
            ended=ended,
            is_cut_off=self._connection_is_lost,
            host=self._host,
            shows_recent=self._shows_recent is not None,
        )
        self._store.set(state_key(self.rank), state.to_json())

    def _learn(self, end: str) -> None:
        self._store.set(f"seen/{self.rank}", "")
        if end == _FAREWELL:
            self._answered = float("inf")  # the store answers no more, and has said so
            self.store_is_gone = True
            self._failure_is_known.set()
            return
        # It asks no more, and must not count as waiting for the store.
        self._has_read_failure, self._answered = True, time.monotonic()
        if self.failure is None:
            self.failure = end
            can_raise = self.meeting is not None or self.interrupt is not None
            if not can_raise and not self._connection_is_lost:
                # The next call raises it. But the program may be waiting for a device, or for a
                # backend that cannot be interrupted, and then no error can be raised.
                logger.warning("bmt: rank %d cannot go on. %s", self.rank, end)
        self._failure_is_known.set()
        learned = time.monotonic()
        while (meeting := self.meeting) is not None and self._may_believe_in_calls(learned):
            time.sleep(0.02)
        if meeting is not None:
            self._store.compare_set(meeting, "", _FAILED)
        interrupt = self.interrupt  # which the main thread may take away meanwhile
        if interrupt is not None:
            interrupt()
        self._end_on_device(self.failure)

    def _end_on_device(self, failure: str) -> None:
        """End what the GPU waits for, once, because the run has failed."""
        functions, self.on_failure = self.on_failure, []
        for function in functions:
            try:
                function(failure)
            except Exception as error:
                logger.warning("bmt: calls on the GPU of rank %d go on: %s", self.rank, error)

    def _wait_for_readers(self) -> None:
        end = time.monotonic() + _READERS_PATIENCE * self.period
        keys = [f"seen/{other}" for other in self._others]
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(0.02)


def period_of(world_size: int) -> float:
    """Return after how many seconds each of ``world_size`` ranks writes its state."""
    return PERIOD * max(1.0, world_size / _RANKS_OF_A_STORE)


def _stack_of_program() -> str:
    """Return the innermost calls of the main thread, as a traceback shows them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=_FRAMES)).rstrip()


def mismatch_text(call: Call, rank: int, first_rank: int, first_text: str) -> str:
    """Return the failure of ``rank``, which has entered ``call`` where ``first_rank`` had entered
    another one.
    """
    return (
        f"Ranks have entered different calls: rank {rank} is in {call}, and the same call of rank"
        f" {first_rank} is: {first_text}. {ADVICE}"
    )
