"""``CallLog``: the last calls of this rank, and how those of several ranks differ."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import ref

from bmt_core.comm.annotate import Place
from bmt_core.comm.protocols import Finished
from bmt_watch.call_history import CallHistory
from bmt_watch.rank_states import Call, made

KEPT = 512
"""How many calls of each group are kept."""
RECENT = 64
"""How many of the calls that were compared are shown to others, those of all groups together."""


class Observed(Protocol):
    """The interface of the work of an observed call."""

    def is_completed(self) -> bool:
        """Whether it is known to have ended well. Another thread may ask."""


class Entry(NamedTuple):
    """A call of a group. ``what`` is its operation, and ``annotation`` what is shown of its purpose
    and what is compared; or it is the call itself, and these are its text and what of that is
    compared. ``first`` is the rank that made the call first, -1 if that is not known; None if the
    call was queued on a GPU and not compared.
    """

    number: int
    what: tuple[object, ...] | Call
    size: int
    annotation: tuple[str, str]
    place: Place
    step: int
    time: float
    first: int | None

    @property
    def texts(self) -> tuple[str, str]:
        """What is shown of the call, and what of it must be the same on all ranks."""
        if isinstance(self.what, Call):
            return self.annotation
        text, (shown, compared) = call_text(self.what, self.size), self.annotation
        return text + shown, text + compared


class GroupLog:
    """The last calls of the group ``name`` of ``ranks``. ``add`` takes an :class:`Entry`, or an
    equal tuple, which takes a third of the time.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.number = 0
        """That of the last call."""
        self.under_way: dict[int, ref[Observed]] = {}
        """The works of calls that may not have ended, by number."""
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self.add: Callable[[Any], None] = self._entries.append  # in C: it runs in every collective

    def entries(self) -> list[Entry]:
        """Return the calls that are kept. Another thread may ask."""
        return [Entry(*entry) for entry in list(self._entries)]

    def last_on_device(self) -> Call | None:
        """Return the last call that was queued on the GPU; None if there is none."""
        for entry in reversed(list(self._entries)):
            if entry[-1] is None:
                return self.call_of(Entry(*entry))
        return None

    def call_of(self, entry: Entry) -> Call:
        """Return the call of ``entry``."""
        if isinstance(entry.what, Call):
            return entry.what
        return Call(
            group=self.name,
            ranks=self.ranks,
            number=entry.number,
            text=entry.texts[0],
            place=entry.place.text,
        )


class CallLog:
    """The calls of this rank, by groups, and what it does now: the main thread writes it, and
    :class:`CallWatch` reads it. ``history`` records the calls in a file.
    """

    def __init__(self, history: CallHistory | None = None) -> None:
        self.history = history
        self.groups: list[GroupLog] = []
        self.last: Call | None = None
        """The last call that was compared, or the last send or receive."""
        self.waiting: tuple[Call, float] | None = None
        """The call for whose end this rank waits, and since when."""
        self.interrupt: Callable[[], None] | None = None
        """Ends this wait, by an error."""
        self.meeting: str | None = None
        """The key of the store for which the main thread waits, until all members of a group have
        entered a call.
        """
        self.step = 0
        """The number of a pipeline's present step."""
        self.given_up: tuple[str, tuple[int, ...]] = "", ()
        """The error for which this rank makes no more calls in its present step, but those with the
        group of these ranks.
        """
        self.training_step = 1
        """The number of the present step of the first optimizer that is stepped."""
        self.now = time.time()
        """The time to a period of the watch: asking for it takes longer than noting a call."""
        self._counted = 0  # this optimizer

    def end_of_step(self, optimizer: object, *_: object) -> None:
        """Count the steps of the first optimizer that is stepped. A hook of torch's optimizers."""
        self._counted = self._counted or id(optimizer)
        if id(optimizer) == self._counted:
            self.training_step += 1
        if self.history is not None:
            self.history.training_step = self.training_step

    def entered(self) -> dict[str, int]:
        """Return the number of the last call in each group."""
        return {group.name: group.number for group in self.groups if group.number}

    def recent(self) -> str:
        """Return what others read to learn of a silent rank: the last compared calls, when each was
        made, and who has certainly made it.
        """
        under_way = {self.waiting[0]} if self.waiting else set()
        calls = []
        for group in self.groups:
            compared = [entry for entry in group.entries() if entry.first is not None]
            for each in compared[-RECENT:]:
                calls.append((each.time, call := group.call_of(each), each.first))
                work = group.under_way.get(each.number, Finished)()
                if work is None or not work.is_completed():  # None: nobody has waited for it
                    under_way.add(call)
        calls = sorted(calls, key=lambda call: call[0])[-RECENT:]
        return json.dumps(
            [
                (vars(call), when, [first] if call in under_way else call.ranks)
                for when, call, first in calls
            ]
        )

    def to_bytes(self) -> bytes:
        """Return all calls that are kept. Layers make alike calls, so that a step's take a few
        kilobytes.
        """
        calls, times = [], []
        for group in self.groups:
            if entries := group.entries():
                texts = [(*each.texts, made(each.place.text)) for each in entries]
                shown = [text + place for text, _, place in texts]
                compared = [len(text) for _, text, _ in texts]
                numbers, steps = ([each[at] for each in entries] for at in (0, 5))
                calls.append((group.name, group.ranks, numbers, shown, compared, steps))
                times.append([int(each.time) for each in entries])
        # Apart, because times differ where calls are the same.
        packed = _packed(calls)
        return len(packed).to_bytes(4) + packed + _packed(times)


def call_text(operation: Iterable[object], size: int) -> str:
    """Return what is compared and shown of a call on a tensor of ``size`` bytes.

    >>> call_text(("all_reduce", "sum"), 16)
    'all_reduce sum, 16 bytes'
    """
    return f"{' '.join(map(str, operation))}, {size} bytes"


def first_difference(of_ranks: Mapping[int, bytes]) -> str:
    """Return the first call of a group that is not the same on two ranks, as a text, from what
    :meth:`CallLog.to_bytes` has returned on each; empty if there is none.
    """
    # Most ranks have made the same calls, which are read once.
    calls_of = {rank: data[4 : 4 + int.from_bytes(data[:4])] for rank, data in of_ranks.items()}
    first = {calls_of[rank]: rank for rank in sorted(of_ranks, reverse=True)}
    made_calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[str, tuple[Any, ...]]]] = {}
    for calls, rank in sorted(first.items(), key=lambda each: each[1]):
        for group, (name, ranks, *columns) in enumerate(_unpacked(calls)):
            by_number = made_calls.setdefault((name, tuple(ranks)), {})
            for at, (number, shown, length, step) in enumerate(zip(*columns, strict=True)):
                entered = rank, group, at, step, shown
                by_number.setdefault(number, {}).setdefault(shown[:length], entered)
    for (name, ranks), by_number in made_calls.items():
        for number, texts in sorted(by_number.items()):
            if len(texts) > 1:
                two = []
                for rank, group, at, step, shown in [*texts.values()][:2]:
                    when = _unpacked(of_ranks[rank][4 + len(calls_of[rank]) :])[group][at]
                    clock = time.strftime("%H:%M:%S", time.localtime(when))
                    two.append(f"on rank {rank}, in step {step}, at {clock}: {shown}")
                members = ", ".join(map(str, ranks))
                return f"call {number} of group {name} (ranks {members}) is {'; '.join(two)}"
    return ""


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
