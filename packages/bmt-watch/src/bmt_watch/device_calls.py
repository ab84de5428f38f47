"""``DeviceCalls``: the last calls of a group that a rank has queued on its GPU, and how those of
several ranks differ.
"""

from __future__ import annotations

import json
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bmt_core.comm.annotate import Place
from bmt_watch.rank_states import Call, made

KEPT = 512
"""How many calls of each group are kept."""


class DeviceCalls:
    """The last :data:`KEPT` calls of the group ``name`` of ``ranks`` that this rank has queued on
    its GPU without waiting for the others. ``add`` takes a call's number, its operation, the bytes
    of its tensor, what is shown of its purpose and what is compared, and where in the model it was
    made. The first call is one of training step ``step``.

    A call's step and time cost nothing when it is made: :meth:`begin_step` and :meth:`note_time`
    note them for all calls that follow.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], step: int = 1) -> None:
        self._name, self._ranks = name, ranks
        self._calls: deque[tuple[int, tuple[object, ...], int, tuple[str, str], Place]]
        self._calls = deque(maxlen=KEPT)
        self.add = self._calls.append  # one call of C: it runs in every collective
        self._steps, self._times = _Notes(step), _Notes(int(time.time()))

    def begin_step(self, step: int) -> None:
        """Note that later calls are those of training step ``step``."""
        self._steps.add(self._next, step)

    def note_time(self) -> None:
        """Note that later calls are made from now on. :class:`CallWatch` does so in every period,
        so that a call's time is known to a period.
        """
        self._times.add(self._next, int(time.time()))

    @property
    def _next(self) -> int:
        return self._calls[-1][0] + 1 if self._calls else 0

    def last(self) -> Call | None:
        """Return the last call; None if there is none."""
        if not self._calls:
            return None
        number, operation, size, (shown, _), now = self._calls[-1]
        text = call_text(operation, size) + shown
        return Call(group=self._name, ranks=self._ranks, number=number, text=text, place=now.text)

    def queued(self) -> QueuedCalls:
        """Return all calls that are kept."""
        calls = list(self._calls)  # at once, because the main thread may add to them
        shown, compared = [], []
        for _, operation, size, (own, common), place in calls:
            text = call_text(operation, size)
            shown.append(text + own + made(place.text))
            compared.append(len(text + common))
        numbers = [call[0] for call in calls]
        steps, times = self._steps.of(numbers), self._times.of(numbers)
        return QueuedCalls(self._name, self._ranks, numbers, shown, compared, steps, times)


class _Notes:
    """What holds from a call on until the next note; ``value`` from the first call on. Of the last
    :data:`KEPT` calls it is known.
    """

    def __init__(self, value: int) -> None:
        # One more: there may be no call yet after the last note.
        self._notes = deque([(0, value)], maxlen=KEPT + 1)

    def add(self, number: int, value: int) -> None:
        """Note ``value`` from call ``number`` on."""
        if self._notes[-1][0] == number:  # no call since the last note
            self._notes[-1] = number, value
        else:
            self._notes.append((number, value))

    def of(self, numbers: Iterable[int]) -> list[int]:
        """Return what was noted for the calls with these numbers."""
        notes = list(self._notes)
        firsts = [first for first, _ in notes]
        return [notes[bisect_right(firsts, number) - 1][1] for number in numbers]


class QueuedCalls(NamedTuple):
    """The calls that a rank has queued in a group: the number of each, what is shown of it, how
    many characters of that must be the same on all ranks, its training step, and when it was made,
    as ``time.time()``.
    """

    group: str
    ranks: tuple[int, ...]
    numbers: Sequence[int]
    shown: Sequence[str]
    compared: Sequence[int]
    steps: Sequence[int]
    times: Sequence[int]


def call_text(operation: Iterable[object], size: int) -> str:
    """Return what is compared and shown of a call on a tensor of ``size`` bytes.

    >>> call_text(("all_reduce", "sum"), 16)
    'all_reduce sum, 16 bytes'
    """
    return f"{' '.join(map(str, operation))}, {size} bytes"


def to_bytes(groups: Iterable[DeviceCalls]) -> bytes:
    """Return the calls that this rank has queued, of all groups in which there are some. Layers
    make alike calls, so that a step's take a few kilobytes.
    """
    queued = [each for group in groups if (each := group.queued()).numbers]
    # Apart, because times differ where calls are the same.
    calls, times = _packed([each[:-1] for each in queued]), _packed([each.times for each in queued])
    return len(calls).to_bytes(4) + calls + times


def first_difference(of_ranks: Mapping[int, bytes]) -> str:
    """Return the first call of a group that is not the same on two ranks, as a text, from what
    :func:`to_bytes` has returned on each; empty if there is none.

    >>> from bmt_core.comm.annotate import NOWHERE
    >>> groups = DeviceCalls("dp", (0, 1)), DeviceCalls("dp", (0, 1))
    >>> for rank, group in enumerate(groups):
    ...     group.begin_step(3)
    ...     group.add((7, ("send",), 4 + rank, ("", ""), NOWHERE))
    >>> print(first_difference({rank: to_bytes([group]) for rank, group in enumerate(groups)}))
    ...     # doctest: +ELLIPSIS
    call 7 of group dp (ranks 0, 1) is on rank 0, in step 3, at ...: send, 4 bytes; on rank 1, in \
step 3, at ...: send, 5 bytes
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[str, _Entered]]] = {}
    # Most ranks have made the same calls, which are read once.
    calls_of = {rank: data[4 : 4 + int.from_bytes(data[:4])] for rank, data in of_ranks.items()}
    first = {calls_of[rank]: rank for rank in sorted(of_ranks, reverse=True)}
    for calls, rank in sorted(first.items(), key=lambda each: each[1]):
        for group, (name, ranks, *columns) in enumerate(_unpacked(calls)):
            by_number = groups.setdefault((name, tuple(ranks)), {})
            for at, (number, shown, length, step) in enumerate(zip(*columns, strict=True)):
                entered = _Entered(rank, (group, at), step, shown)
                by_number.setdefault(number, {}).setdefault(shown[:length], entered)
    for (name, ranks), by_number in groups.items():
        for number, texts in sorted(by_number.items()):
            if len(texts) > 1:
                two = []
                for rank, (group, at), step, shown in [*texts.values()][:2]:
                    made = _unpacked(of_ranks[rank][4 + len(calls_of[rank]) :])[group][at]
                    when = time.strftime("%H:%M:%S", time.localtime(made))
                    two.append(f"on rank {rank}, in step {step}, at {when}: {shown}")
                members = ", ".join(map(str, ranks))
                return f"call {number} of group {name} (ranks {members}) is {'; '.join(two)}"
    return ""


class _Entered(NamedTuple):
    """A call as ``rank`` has made it; ``at`` is where its time is: the group, the call in it."""

    rank: int
    at: tuple[int, int]
    step: int
    shown: str


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
