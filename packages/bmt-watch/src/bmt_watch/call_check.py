"""``GroupCalls``: describes every collective by a number and a text, and raises on a rank whose
text differs from the others'.

[Note: how calls are checked] A rank that is alone in a collective, or in another one than the rest,
would hang, gloo would abort its process, or data of different calls would be mixed. Two checks
prevent this, both through the rendezvous store.

- *Before* a collective, :meth:`GroupCalls.enter` compares operation, size, dtype and the tensor's
  name with those of the first rank that entered the call of this number in this group. That is one
  request (``compare_set``), which waits for nobody. A rank that differs raises before it starts the
  collective, so gloo sees no message of a wrong size.
- *During* a collective, :class:`CallWatch` learns whether the run has failed, and then interrupts
  the wait of the main thread. The watch is a thread that writes every second what this rank has
  entered, what it waits for, and whether it has ended. When a rank has waited two seconds (more
  with many ranks), the watch of rank 0 reads what all have written (:class:`StuckCalls`). If a
  member has ended, or ranks wait for each other in different groups, the calls of all ranks fail.
  Members that have not entered the call are named in a warning. If a connection is lost, some rank
  is gone: it is the one whose watch has stopped writing. Where the launcher serves the store, and
  rank 0 is the one that is gone, the next rank reads in its place.

The first failure is written to the store. Every rank raises it in the call in which it waits, or in
its next one.

The text in the store also says where in the model the call was made, which is shown and not
compared. By the last calls that they keep, ranks name the last one of a rank that is killed or
stopped, too: see [Note: the last call of a silent rank] in ``silent_ranks.py``.

On the CPU all calls are checked, unless the rendezvous is a file, which would grow with every
comparison. On a GPU the host does not wait for a collective. So there the host waits before it
starts a collective until all members have entered it: one request (``add``) counts them and
compares a digest of their texts, and one waits. If a digest differs, the texts are compared as on
the CPU. It does so for the first calls of each group, or for all with ``check_calls=True``; and on
the CPU for all calls of a backend whose waits cannot be interrupted. Later calls on a GPU are only
kept (:class:`CallLog`). A rank that has made no call for half a minute shows them to the others,
and warns of the first call that is not the same on all ranks, and of whoever has not entered the
last one of some group. Sends and receives have no number; only lost connections are noticed. Once
the run has failed, the watch ends all that the GPU waits for (``CommBackend.abort``), with wrong
results, and the next call raises.

With ``BMT_CALL_HISTORY`` every rank also records all its calls, those of GPUs and sends and
receives, too, in a file (:class:`CallHistory`), which ``bmt hang`` reads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bmt_core.comm.annotate import ANNOTATION, PLACES
from bmt_core.errors import CallError
from bmt_watch.call_log import CallLog, GroupLog, call_text
from bmt_watch.call_watch import MET, CallWatch
from bmt_watch.explanation import ADVICE
from bmt_watch.rank_states import Call
from bmt_watch.run_end import RunEnd

FIRST_CALLS = 200
"""How many calls of each group are checked on a GPU, with at most 32 ranks; with more, so many that
all ranks make as many requests as these.
"""
# How many calls' texts are kept for each group; a rank that lags further behind is not compared.
_SLOTS = 256
_ROUNDING = 1.0  # seconds by which a backend may end a wait before the run's timeout
_TEXTS = 2000  # how many texts of calls are kept for each group


def first_calls_of(world_size: int) -> int:
    """Return how many calls of each group are checked on a GPU."""
    return max(1, min(FIRST_CALLS, 32 * FIRST_CALLS // world_size))


class WatchedRun(Protocol):
    """What all groups of a run share. ``first_calls`` of each are checked on a GPU; ``timeout`` is
    in seconds.
    """

    log: CallLog
    watch: CallWatch
    end: RunEnd
    store: Any
    timeout: float
    first_calls: float


class GroupCalls:
    """The calls of one group on this rank."""

    def __init__(self, observer: WatchedRun, name: str, ranks: tuple[int, ...]) -> None:
        self.is_closed = False
        """Whether the run has ended, so that calls are not observed any more."""
        self._watch, self._end, self._log = observer.watch, observer.end, observer.log
        self._store, self._timeout = observer.store, observer.timeout
        self._name, self._ranks = name, ranks
        self._calls = GroupLog(name, ranks)
        self._add = self._calls.add
        self.under_way = self._calls.under_way
        self._log.groups.append(self._calls)
        self._device_calls_left = observer.first_calls
        self._history = history = observer.log.history
        self._index = 0 if history is None else history.add_group(name, ranks)
        self._texts = _Texts()
        self._slots = [""] * _SLOTS  # what this rank last saw in each slot of the store
        self._numbers = [0] * _SLOTS  # the number of that call
        self._firsts: list[list[str]] = [[]] * _SLOTS  # which rank entered it first, and its texts

    def enter(
        self, operation: tuple[object, ...], tensor: torch.Tensor, *, meets: bool = False
    ) -> Call:
        """Enter the next call. ``operation`` is its name and all that must be equal on all ranks,
        ``tensor`` this rank's tensor. ``meets``: return when all members have entered it.

        Raises :class:`CallError` if another rank has entered a different call.
        """
        shown, compared = self._texts[operation, tensor.nbytes, ANNOTATION.texts]
        if meets:
            return self._meet(shown, compared=compared)
        call = self._next_call(shown, compared)
        self._has_entered(call, compared, self._compare(call, compared))
        return call

    def enter_on_device(self, operation: tuple[object, ...], tensor: torch.Tensor) -> None:
        """Like :meth:`enter`, for a call on a GPU; return when all members have entered it.

        Once the first calls of the group are checked, it notes the call and returns at once.
        """
        if self._device_calls_left > 0:
            self._device_calls_left -= 1
            shown, compared = self._texts[operation, tensor.nbytes, ANNOTATION.texts]
            self._meet(shown, compared=compared)
            return
        calls, log, size, purpose = self._calls, self._log, tensor.nbytes, ANNOTATION.texts
        calls.number = number = calls.number + 1
        self._add((number, operation, size, purpose, PLACES.now, log.training_step, log.now, None))
        if self._history is not None:
            shown, compared = self._texts[operation, size, purpose]
            self._history.enter(self._index, number, shown.encode(), len(compared))

    def raise_failure(self) -> None:
        """Raise :class:`CallError` if the calls of the run have failed."""
        self._end.raise_failure()

    def close(self) -> None:
        """Observe no more calls, because the run has ended."""
        self.is_closed = True

    def check_all(self) -> None:
        """Check all later calls on the GPU, so that the next one raises the failure of the run."""
        self._device_calls_left = float("inf")

    def connect(self) -> None:
        """Wait until all members are about to connect the group, because connecting has no timeout
        of its own.
        """
        if self.is_closed:
            return
        text = "the first operation on the group"
        self._meet(text + ANNOTATION.texts[0], compared=text)

    def enter_transfer(self, what: str, peers: Iterable[int]) -> Call:
        """Record and return the call of ``what``, "a send to", and ``peers``, by index."""
        # The backend refuses other peers.
        known = {peer for peer in peers if 0 <= peer < len(self._ranks)}
        ranks = tuple(sorted(self._ranks[peer] for peer in known))
        group = f"{what} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        text = group + ANNOTATION.texts[0]
        if self._end.failure is not None:
            self._end.raise_failure(text)
        record = 0
        if self._history is not None:
            record = self._history.enter(self._index, 0, text.encode(), 0)
        call = self._log.last = Call(
            group=group,
            ranks=ranks,
            number=0,
            text=text,
            record=record,
            place=PLACES.now.text,
        )
        return call

    def guard(
        self,
        call: Call,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        interrupt: Callable[[], None] | None,
    ) -> Any:
        """Return ``function(*arguments)``, which starts or waits for ``call``. ``interrupt()``, on
        another thread, makes it raise; None if nothing does.
        """
        begin = time.monotonic()
        self._log.waiting, self._log.interrupt = (call, begin), interrupt
        try:
            if self._end.failure is not None:  # from now on the watch interrupts
                self._end.raise_failure(call)
            return function(*arguments)
        except CallError:
            raise
        except RuntimeError as error:
            self._log.interrupt = None
            if time.monotonic() - begin > self._timeout - _ROUNDING:
                raise self._watch.error_of_timeout(call, self._timeout) from None
            raise self._watch.error_of_lost_connection(call, error) from None
        finally:
            self._log.waiting = self._log.interrupt = None

    def _next_call(self, text: str, compared: str) -> Call:
        if self._end.failure is not None:
            self._end.raise_failure(text)
        number, record = self._calls.number + 1, 0
        if self._history is not None:  # before it fails, or waits for the store
            record = self._history.enter(self._index, number, text.encode(), len(compared))
        return Call(
            group=self._name,
            ranks=self._ranks,
            number=number,
            text=text,
            record=record,
            place=PLACES.now.text,
        )

    def _has_entered(self, call: Call, compared: str, first: int) -> None:
        self._calls.number = call.number
        self._log.last = call
        texts, place, step = (call.text, compared), PLACES.now, self._log.training_step
        self._add((call.number, call, 0, texts, place, step, time.time(), first))

    def _compare(self, call: Call, compared: str) -> int:
        """Return the rank that entered ``call`` first, which may be this one; -1 if that is not
        known. Raise if it has entered another one.

        A slot holds the first rank's entry until the call :data:`_SLOTS` later replaces it. Every
        rank remembers what it last saw in the slot, so one ``compare_set`` either replaces that or
        returns the entry of a faster rank. It may return an earlier call of which this rank has
        compared a digest alone.
        """
        number = call.number
        slot = number % _SLOTS
        while self._numbers[slot] < number and not self._end.store_is_gone:
            made = f", made {call.place}" if call.place else ""
            own = f"{number} {self._end.rank} {compared}\n{call.text}{made}"
            begin = time.monotonic()
            try:
                found = self._store.compare_set(
                    f"entered/{self._name}/{slot}", self._slots[slot], own
                ).decode()
            except dist.DistError as error:
                if time.monotonic() - begin >= self._watch.longest_silence:
                    raise self._watch.error_of_lost_connection(call, error) from None
                # The rank that serves the store may leave first. Ranks that wait for it notice the
                # lost connection.
                return -1
            self._slots[slot] = found
            number_found, *self._firsts[slot] = found.split(" ", 2)
            self._numbers[slot] = int(number_found)
        if self._numbers[slot] != number:
            return -1
        first, texts = self._firsts[slot]
        of_first, shown = texts.split("\n", 1)
        if of_first != compared:
            self._end.fail(
                f"Ranks have entered different calls: rank {self._end.rank} is in {call}, and the"
                f" same call of rank {first} is: {shown}. {ADVICE}",
                self._store,
            )
            self._end.raise_failure()
        return int(first)

    def _meet(self, text: str, *, compared: str) -> Call:
        """Enter the next call, and return when all members have entered it."""
        call = self._next_call(text, compared)
        key = f"met/{self._name}/{call.number}"
        try:
            members, are_equal = self._count_in(key, compared)
            first = -1
            if members == 1 or not are_equal:
                # The first one writes its text, and whoever's digest differs finds it, or the
                # other way round.
                first = self._compare(call, compared)
            self._has_entered(call, compared, first)
            if members == len(self._ranks) and are_equal:
                self._store.set(f"{key}/all", MET)
                # All members have left the call before.
                for suffix in ("", "/all"):
                    self._store.delete_key(f"met/{self._name}/{call.number - 1}{suffix}")
                return call
            self._log.waiting, self._log.meeting = (call, time.monotonic()), f"{key}/all"
            # The watch ends the meeting if it learns of a failure after this line.
            self._end.raise_failure(call)
            self._store.wait([f"{key}/all"], timedelta(seconds=self._timeout))
            if not self._watch.knows_that_calls_go_on and (
                self._store.compare_set(f"{key}/all", "", "").decode() != MET
            ):
                unknown = "The calls of the run have failed. Look at the output of all ranks."
                raise self._end.error_in(call, self._watch.known_failure() or unknown)
            return call
        except dist.DistStoreError:
            raise self._watch.error_of_timeout(call, self._timeout) from None
        except dist.DistError as error:
            raise self._watch.error_of_lost_connection(call, error) from None
        finally:
            self._log.waiting = self._log.meeting = None

    def _count_in(self, key: str, compared: str) -> tuple[int, bool]:
        """Return how many members have entered a call, with this one, and whether what they
        compare is equal, by one request: the lowest bits of the sum count them, and the others add
        a digest of each.
        """
        bits = len(self._ranks).bit_length()
        digest = hashlib.blake2b(compared.encode(), digest_size=8).digest()
        own = int.from_bytes(digest, "big") >> 1 + 2 * bits << bits | 1  # the sum has 63 bits
        total = self._store.add(key, own)
        members = total & (1 << bits) - 1
        return members, total == members * own


class _Texts(dict[tuple[tuple[object, ...], int, tuple[str, str]], tuple[str, str]]):
    """What is shown of calls and what is compared, by their operation, bytes and annotation.
    Formatting takes longer than all else that notes a call, and the calls of a step repeat.
    """

    def __missing__(self, key: tuple[tuple[object, ...], int, tuple[str, str]]) -> tuple[str, str]:
        if len(self) >= _TEXTS:
            self.clear()
        operation, size, (shown, compared) = key
        text = call_text(operation, size)
        self[key] = texts = text + shown, text + compared
        return texts
