"""``last_known``: what other ranks know of the last calls of one that is killed or stopped.

[Note: the last call of a silent rank] A rank writes its state once in a period, and may make many
calls before it is killed. But all ranks make the same calls in the same order. So a rank that waits
shows its last calls: which of them have ended, which all members have made, and which rank made
each one first. The silent rank has made all of these up to some call, and probably not the next
one. Between the two it was in one of the forwards and backwards through which the other ranks came
there, each in its own time: one may be ahead of another. But for some calls, such as reductions of
gradients, nobody waits at once: it may have made the next one, too, and more. So the places to
which the others have come since then are named as later ones. Places before the one that it has
written itself are left out; if it waits, or is where the others were not, that one is named alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from bmt_core.comm.annotate import Passed
from bmt_watch.rank_states import Call, RankState

_LISTED = 4  # of more places a text names the first and the last


class RecentCall(NamedTuple):
    """A call, when a rank made it, as ``time.time()``, and the ranks that have certainly made
    it.
    """

    call: Call
    time: float
    made_by: Sequence[int]

    def without_place_but(self, places: Collection[str]) -> RecentCall:
        """Return this without the place of the call, unless it is one of ``places``."""
        place = self.call.place if self.call.place in places else ""
        return self._replace(call=replace(self.call, place=place))


class Shown(NamedTuple):
    """What a rank shows to the others: its last calls and the last places to which it came."""

    calls: Sequence[RecentCall]
    passed: Sequence[Passed]

    @classmethod
    def from_json(cls, text: str | bytes) -> Shown:
        """Undo :meth:`CallLog.recent`."""
        calls, passed = json.loads(text)
        return cls([RecentCall(Call.of(call), *others) for call, *others in calls], passed)


def last_known(rank: int, state: RankState, of_others: Iterable[Shown], now: float) -> RankState:
    """Return ``state``, of the silent ``rank``, with its last call, the next one and its place as
    far as others know: see [Note: the last call of a silent rank].

    >>> one, two = (Call(group="dp", ranks=(0, 1), number=n, text="all_reduce") for n in (1, 2))
    >>> calls = RecentCall(one, 10.0, (0, 1)), RecentCall(two, 11.0, (0,))
    >>> passed = [("in the forward of layers.0", 10.5, (0, 1))]
    >>> state = last_known(1, RankState(), [Shown(calls, passed)], 15.0)
    >>> state.last.number, state.following.number, state.place
    (1, 2, 'in the forward of layers.0')
    """
    made: RecentCall | None = None
    following = list[RecentCall]()
    # Of each rank: when it made the last call that both have made, and its places from that call
    # to the next one, and from that call until now.
    ways = list[tuple[float, list[str], list[str]]]()
    for calls, places in of_others:
        shared = [each for each in places if rank in each[2]]
        own = {text for text, *_ in shared}  # of another stage of a pipeline the places are others
        common = [each.without_place_but(own) for each in calls if rank in each.call.ranks]
        known = [index for index, each in enumerate(common) if rank in each.made_by]
        count = known[-1] + 1 if known else 0
        following += common[count : count + 1]
        last = common[count - 1] if known else None
        if made is None or (last and made.time < last.time):
            made = last
        begin, place = (last.time, last.call.place) if last else (0.0, "")
        ends = common[count].time if count < len(common) else inf, inf
        to_next, to_now = ([text for text, when, _ in shared if begin < when < end] for end in ends)
        ways.append((begin, [place, *to_next], [place, *to_now]))
    ways.sort(key=lambda each: -each[0])
    begin = 0.0 if made is None else made.time
    later = [each for each in following if each.time >= begin]
    first = min(later, default=None, key=lambda each: each.time)
    state = replace(state, following=None if first is None else first.call)
    if made is None:
        return state
    until_now = _common(way for *_, way in ways)
    between = _common(way for _, way, _ in ways) or until_now
    if state.last == made.call and state.waiting is None and state.place in until_now:
        # It may have gone on from there since it has written.
        until_now = until_now[until_now.index(state.place) :]
        between = [place for place in between if place in until_now] or until_now
    elif state.entered.get(made.call.group, 0) >= made.call.number:
        return state
    later_places = [place for place in until_now if place not in between]
    return replace(
        state,
        entered={**state.entered, made.call.group: made.call.number},
        last=made.call,
        waiting=None,
        place=", or later ".join(map(_one_of, filter(None, (between, later_places)))),
        seconds=now - made.time,
    )


def _common(ways: Iterable[Sequence[str]]) -> list[str]:
    """Return the places through which all of ``ways`` lead, in the order of the first. A way that
    shares none with those before it is left out.

    >>> _common([["b", "c", "d"], ["x"], [""], ["a", "b", "c"]])
    ['b', 'c']
    """
    found: list[str] = []
    for way in ways:
        places = [place for place in dict.fromkeys(way) if place]
        found = [place for place in found if place in places] or found or places
    return found


def _one_of(places: Sequence[str]) -> str:
    """Return that a rank is in one of ``places``.

    >>> _one_of(["in the forward of layers.0", "in the forward of layers.1"])
    'in the forward of layers.0 or in the forward of layers.1'
    """
    if len(places) > _LISTED:
        return f"somewhere from {places[0]} to {places[-1]}".replace(" in the ", " the ")
    return " or ".join(places)
