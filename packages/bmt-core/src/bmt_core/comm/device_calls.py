"""``DeviceCalls``: the last calls of a group that a rank has queued on its GPU, and how those of
several ranks differ.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bmt_core.comm.rank_states import Call

KEPT = 512
"""How many calls of each group are kept."""


class DeviceCalls:
    """The last :data:`KEPT` calls of the group ``name`` of ``ranks`` that this rank has queued on
    its GPU without waiting for the others. ``add`` takes a call's number, its operation, the bytes
    of its tensor, and what is shown of its purpose and what is compared. The first call is one of
    training step ``step``.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], step: int = 1) -> None:
        self._name, self._ranks = name, ranks
        self._calls: deque[tuple[int, tuple[object, ...], int, tuple[str, str]]]
        self._calls = deque(maxlen=KEPT)
        self.add = self._calls.append  # one call of C: it runs in every collective
        # The first call of each step, and the step. One more: a step may not have a call yet.
        self._steps = deque([(0, step)], maxlen=KEPT + 1)

    def begin_step(self, step: int) -> None:
        """Note that later calls are those of training step ``step``."""
        first = self._calls[-1][0] + 1 if self._calls else 0
        if self._steps[-1][0] == first:  # a step without a call
            self._steps[-1] = first, step
        else:
            self._steps.append((first, step))

    def last(self) -> Call | None:
        """Return the last call; None if there is none."""
        if not self._calls:
            return None
        number, operation, size, (shown, _) = self._calls[-1]
        text = call_text(operation, size) + shown
        return Call(group=self._name, ranks=self._ranks, number=number, text=text)

    def queued(self) -> QueuedCalls:
        """Return all calls that are kept."""
        # At once, because the main thread may add to them.
        calls, begins = list(self._calls), list(self._steps)
        shown, compared, steps = [], [], []
        for number, operation, size, (own, common) in calls:
            text = call_text(operation, size)
            shown.append(text + own)
            compared.append(len(text + common))
            steps.append(begins[bisect_right(begins, number, key=_first_call) - 1][1])
        numbers = [call[0] for call in calls]
        return QueuedCalls(self._name, self._ranks, numbers, shown, compared, steps)


class QueuedCalls(NamedTuple):
    """The calls that a rank has queued in a group: the number of each, what is shown of it, how
    many characters of that must be the same on all ranks, and its training step.
    """

    group: str
    ranks: tuple[int, ...]
    numbers: Sequence[int]
    shown: Sequence[str]
    compared: Sequence[int]
    steps: Sequence[int]


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
    queued = [each.queued() for each in groups]
    return zlib.compress(json.dumps([each for each in queued if each.numbers]).encode())


def first_difference(of_ranks: Mapping[int, bytes]) -> str:
    """Return the first call of a group that is not the same on two ranks, as a text, from what
    :func:`to_bytes` has returned on each; empty if there is none.

    >>> groups = DeviceCalls("dp", (0, 1)), DeviceCalls("dp", (0, 1))
    >>> for rank, group in enumerate(groups):
    ...     group.begin_step(3)
    ...     group.add((7, ("send",), 4 + rank, ("", "")))
    >>> print(first_difference({rank: to_bytes([group]) for rank, group in enumerate(groups)}))
    call 7 of group dp (ranks 0, 1) is on rank 0, in step 3: send, 4 bytes; on rank 1, in step 3: \
send, 5 bytes
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[str, str]]] = {}
    # Most ranks have made the same calls, which are read once.
    first = {of_ranks[rank]: rank for rank in sorted(of_ranks, reverse=True)}
    for data, rank in sorted(first.items(), key=lambda each: each[1]):
        for name, ranks, *calls in json.loads(zlib.decompress(data)):
            by_number = groups.setdefault((name, tuple(ranks)), {})
            for number, shown, length, step in zip(*calls, strict=True):
                texts = by_number.setdefault(number, {})
                texts.setdefault(shown[:length], f"on rank {rank}, in step {step}: {shown}")
    for (name, ranks), by_number in groups.items():
        for number, texts in sorted(by_number.items()):
            if len(texts) > 1:
                told, members = "; ".join([*texts.values()][:2]), ", ".join(map(str, ranks))
                return f"call {number} of group {name} (ranks {members}) is {told}"
    return ""


def _first_call(step: tuple[int, int]) -> int:
    return step[0]
