"""``GroupCalls``: describes every collective by a number and a text, and raises on a rank whose
text differs from the others'.

[Note: how calls are checked] A rank that is alone in a collective, or in another one than the rest,
would hang, gloo would abort its process, or data of different calls would be mixed. Two checks
prevent this, both through the rendezvous store.

- *Before* a collective, :meth:`GroupCalls.enter` compares operation, size, dtype and the tensor's
  name with those of the first rank that entered the call of this number in this group, by one
  request (``compare_set``), which waits for nobody. A rank that differs raises before it starts the
  collective, so gloo sees no message of a wrong size.
- *During* a collective, the thread of :class:`CallWatch` writes every second what this rank has
  entered, what it waits for, and whether it has ended. When a rank has waited two seconds (more
  with many ranks), rank 0 reads what all have written (:class:`StuckCalls`); if it is gone, the
  next rank does. If a member has ended, or ranks wait for each other in different groups, the calls
  of all ranks fail. Members that have not entered the call are named in a warning. If a connection
  is lost, some rank is gone: it is the one whose thread has stopped writing.

The first failure is written to the store. The watch of each rank interrupts the call in which it
waits, which raises the failure, or the next call does.

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
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bmt_core.comm.annotate import ANNOTATION, PLACES
from bmt_core.errors import CallError
from bmt_watch.call_log import NOT_COMPARED, RECORDS, UNKNOWN, Text
from bmt_watch.call_watch import MET, CallWatch
from bmt_watch.explanation import ADVICE
from bmt_watch.rank_states import Call, made

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


class GroupCalls:
    """The calls of one group on this rank. ``first_calls`` of them are checked on a GPU;
    ``timeout`` is in seconds.
    """

    def __init__(
        self,
        watch: CallWatch,
        store: Any,
        name: str,
        ranks: tuple[int, ...],
        *,
        timeout: float,
        first_calls: float,
    ) -> None:
        self._device_calls_left = first_calls
        self.log = watch.log
        self.end = watch.end
        self._watch, self._store, self._timeout = watch, store, timeout
        self._name, self._ranks = name, ranks
        self._index = watch.log.add_group(name, ranks)
        self._texts = _Texts()
        # What this rank last saw in each slot of the store, and the number of that call.
        self._slots = [(0, "")] * _SLOTS

    def enter(
        self, operation: tuple[object, ...], tensor: torch.Tensor, *, meets: bool = False
    ) -> Call:
        """Enter the next call. ``operation`` is its name and all that must be equal on all ranks,
        ``tensor`` this rank's tensor. ``meets``: return when all members have entered it.

        Raises :class:`CallError` if another rank has entered a different call.
        """
        text = self._texts[operation, tensor.nbytes, ANNOTATION.texts, PLACES.now]
        if meets:
            return self._meet(text)
        call = self._noted(text, self.log.numbers[self._index] + 1)
        self._compare(call, text)
        return call

    def enter_on_device(self, operation: tuple[object, ...], tensor: torch.Tensor) -> None:
        """Like :meth:`enter`, for a call on a GPU; return when all members have entered it.

        Once the first calls of the group are checked, it notes the call and returns at once.
        """
        text = self._texts[operation, tensor.nbytes, ANNOTATION.texts, PLACES.now]
        if self._device_calls_left > 0:
            self._device_calls_left -= 1
            self._meet(text)
            return
        if self.end.failure is not None:
            self.end.raise_failure(text.shown)
        log, index = self.log, self._index
        number = log.numbers[index] + 1
        log.queued[index] = number, text
        log.add(index, number, text, NOT_COMPARED)

    def connect(self) -> None:
        """Wait until all members are about to connect the group, because connecting has no timeout
        of its own.
        """
        if self.end.has_left:
            return
        text = "the first operation on the group"
        self._meet(Text.of(text + ANNOTATION.texts[0], text, PLACES.now))

    def enter_transfer(self, what: str, peers: Iterable[int]) -> Call:
        """Record and return the call of ``what``, "a send to", and ``peers``, by index."""
        # The backend refuses other peers.
        known = {peer for peer in peers if 0 <= peer < len(self._ranks)}
        ranks = tuple(sorted(self._ranks[peer] for peer in known))
        group = f"{what} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        text = Text.of(group + ANNOTATION.texts[0], "", PLACES.now)
        return self._noted(text, 0, group, ranks)

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
        self.log.waiting, self.log.interrupt = (call, begin), interrupt
        try:
            if self.end.failure is not None:  # from now on the watch interrupts
                self.end.raise_failure(call)
            return function(*arguments)
        except CallError:
            raise
        except RuntimeError as error:
            self.log.interrupt = None
            if time.monotonic() - begin > self._timeout - _ROUNDING:
                raise self._watch.error_of_timeout(call, self._timeout) from None
            raise self._watch.error_of_lost_connection(call, error) from None
        finally:
            self.log.waiting = self.log.interrupt = None

    def _noted(self, text: Text, number: int, group: str = "", ranks: tuple[int, ...] = ()) -> Call:
        """Note and return a call, before it fails, or waits for the store."""
        if self.end.failure is not None:
            self.end.raise_failure(text.shown)
        record = self.log.add(self._index, number, text, UNKNOWN)
        self.log.last = call = Call(
            group or self._name, ranks or self._ranks, number, text.shown, record, text.place
        )
        return call

    def _compare(self, call: Call, text: Text) -> None:
        """Note the rank that entered ``call`` first, which may be this one, if that is known. Raise
        if it has entered another one.

        A slot holds the first rank's entry until the call :data:`_SLOTS` later replaces it. Every
        rank remembers what it last saw in the slot, so one ``compare_set`` either replaces that or
        returns the entry of a faster rank. It may return an earlier call of which this rank has
        compared a digest alone.
        """
        number, slot = call.number, call.number % _SLOTS
        number_found, found = self._slots[slot]
        while number_found < number and not self.end.store_is_gone:
            own = f"{number}\n{self.end.rank}\n{text.compared}\n{text.shown}\n{text.place}"
            begin = time.monotonic()
            try:
                found = self._store.compare_set(f"entered/{self._name}/{slot}", found, own).decode()
            except dist.DistError as error:
                if time.monotonic() - begin >= self._watch.longest_silence:
                    raise self._watch.error_of_lost_connection(call, error) from None
                # The rank that serves the store may leave first. Ranks that wait for it notice the
                # lost connection.
                return
            number_found = int(found.split("\n", 1)[0])
            self._slots[slot] = number_found, found
        if number_found != number:
            return
        _, first, compared, shown, place = found.split("\n")
        if compared != text.compared:
            self.end.fail(
                f"Ranks have entered different calls: rank {self.end.rank} is in {call}, and the"
                f" same call of rank {first} is: {shown}{made(place)}. {ADVICE}",
                self._store,
            )
            self.end.raise_failure()
        self.log.firsts[call.record % RECORDS] = int(first)

    def _meet(self, text: Text) -> Call:
        """Enter the next call, and return when all members have entered it."""
        call = self._noted(text, self.log.numbers[self._index] + 1)
        key = f"met/{self._name}/{call.number}"
        try:
            members, are_equal = self._count_in(key, text.compared)
            if members == 1 or not are_equal:
                # The first one writes its text, and whoever's digest differs finds it, or the
                # other way round.
                self._compare(call, text)
            if members == len(self._ranks) and are_equal:
                self._store.set(f"{key}/all", MET)
                # All members have left the call before.
                for suffix in ("", "/all"):
                    self._store.delete_key(f"met/{self._name}/{call.number - 1}{suffix}")
                return call
            self.log.waiting, self.log.meeting = (call, time.monotonic()), f"{key}/all"
            # The watch ends the meeting if it learns of a failure after this line.
            self.end.raise_failure(call)
            self._store.wait([f"{key}/all"], timedelta(seconds=self._timeout))
            if not self._watch.knows_that_calls_go_on() and (
                self._store.compare_set(f"{key}/all", "", "").decode() != MET
            ):
                unknown = "The calls of the run have failed. Look at the output of all ranks."
                raise self.end.error_in(call, self._watch.known_failure() or unknown)
            return call
        except dist.DistStoreError:
            raise self._watch.error_of_timeout(call, self._timeout) from None
        except dist.DistError as error:
            raise self._watch.error_of_lost_connection(call, error) from None
        finally:
            self.log.waiting = self.log.meeting = None

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


class _Texts(dict[tuple[tuple[object, ...], int, tuple[str, str], str], Text]):
    """The texts of calls by their operation, bytes, annotation and place. Formatting takes longer
    than all else that notes a call, and the calls of a step repeat.
    """

    def __missing__(self, key: tuple[tuple[object, ...], int, tuple[str, str], str]) -> Text:
        if len(self) >= _TEXTS:
            self.clear()
        operation, size, (shown, compared), place = key
        text = f"{' '.join(map(str, operation))}, {size} bytes"
        self[key] = found = Text.of(text + shown, text + compared, place)
        return found
