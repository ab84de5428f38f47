"""``DeviceCalls``: the last calls of a group that a rank has queued on its GPU, and how those of
several ranks differ.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bmt_core.comm.rank_states import Call

KEPT = 512
"""How many calls of each group are kept."""


class DeviceCalls:
    """The last :data:`KEPT` calls of the group ``name`` of ``ranks`` that this rank has queued on
    its GPU without waiting for the others. ``add`` takes a call's number, its operation, the bytes
    of its tensor, and what is shown of its purpose and what is compared.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self._name, self._ranks = name, ranks
        self._calls: deque[tuple[int, tuple[object, ...], int, tuple[str, str]]]
        self._calls = deque(maxlen=KEPT)
        self.add = self._calls.append  # one call of C: it runs in every collective

    def last(self) -> Call | None:
        """Return the last call; None if there is none."""
        if not self._calls:
            return None
        number, operation, size, (shown, _) = self._calls[-1]
        text = call_text(operation, size) + shown
        return Call(group=self._name, ranks=self._ranks, number=number, text=text)

    def queued(self) -> QueuedCalls:
        """Return the texts of all calls that are kept."""
        calls = list(self._calls)  # at once, because the main thread may add to them
        texts = [call_text(operation, size) for _, operation, size, _ in calls]
        purposes = [purpose for *_, purpose in calls]
        return QueuedCalls(
            self._name,
            self._ranks,
            calls[0][0] if calls else 1,
            [text + shown for text, (shown, _) in zip(texts, purposes, strict=True)],
            [text + compared for text, (_, compared) in zip(texts, purposes, strict=True)],
        )


class QueuedCalls(NamedTuple):
    """The calls from number ``first`` on that a rank has queued in a group: what is shown of each,
    and what must be the same on all ranks.
    """

    group: str
    ranks: tuple[int, ...]
    first: int
    shown: Sequence[str]
    compared: Sequence[str]


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
    return zlib.compress(json.dumps([each for each in queued if each.shown]).encode())


def from_bytes(data: bytes) -> list[QueuedCalls]:
    """Undo :func:`to_bytes`."""
    return [
        QueuedCalls(group, tuple(ranks), *others)
        for group, ranks, *others in json.loads(zlib.decompress(data))
    ]


def first_difference(of_ranks: Mapping[int, Iterable[QueuedCalls]]) -> str:
    """Return the first call of a group that is not the same on all ranks that have queued it, as a
    text; empty if there is none.

    >>> one, other = (QueuedCalls("dp", (0, 1), 7, calls, calls) for calls in ("ab", "ac"))
    >>> first_difference({0: [one], 1: [other]})
    'call 8 of group dp (ranks 0, 1) is on rank 0: b; on rank 1: c'
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, QueuedCalls]] = defaultdict(dict)
    for rank, queued in of_ranks.items():
        for each in queued:
            groups[each.group, each.ranks][rank] = each
    for (group, ranks), of_members in groups.items():
        begin = max(each.first for each in of_members.values())
        compared = [each.compared[begin - each.first :] for each in of_members.values()]
        for number, texts in enumerate(zip(*compared, strict=False), begin):
            if len({*texts}) == 1:
                continue
            first: dict[str, int] = {}  # of the ranks with each text
            for rank, text in zip(of_members, texts, strict=True):
                first.setdefault(text, rank)
            told = (
                f"on rank {rank}: {of_members[rank].shown[number - of_members[rank].first]}"
                for rank in first.values()
            )
            members = ", ".join(map(str, ranks))
            return f"call {number} of group {group} (ranks {members}) is {'; '.join(told)}"
    return ""
