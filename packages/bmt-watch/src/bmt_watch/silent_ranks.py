"""``last_known``: what other ranks know of the last calls of one that is killed or stopped.

[Note: the last call of a silent rank] A rank writes its state once in a period, and may make many
calls before it is killed. But all ranks make the same calls in the same order. So a rank that waits
shows its last calls: which of them have ended, which all members have made, and which rank made
each one first. The silent rank has made all of these up to some call, and probably not the next
one; but for some calls, such as reductions of gradients, nobody waits at once, so it may have made
the next one, too, and more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bmt_watch.rank_states import Call, RankState


class RecentCall(NamedTuple):
    """A call, when a rank made it, as ``time.time()``, and the ranks that have certainly made
    it.
    """

    call: Call
    time: float
    made_by: Sequence[int]


def recent_calls(text: str | bytes) -> list[RecentCall]:
    """Return the calls that a rank shows by :meth:`CallLog.recent`."""
    return [RecentCall(Call.of(call), *others) for call, *others in json.loads(text)]


def last_known(
    rank: int, state: RankState, of_others: Iterable[Sequence[RecentCall]], now: float
) -> RankState:
    """Return ``state``, of the silent ``rank``, with its last call and the next one, as far as
    others know: see [Note: the last call of a silent rank].

    >>> one, two = (Call(group="dp", ranks=(0, 1), number=n, text="all_reduce") for n in (1, 2))
    >>> calls = RecentCall(one, 10.0, (0, 1)), RecentCall(two, 11.0, (0,))
    >>> state = last_known(1, RankState(), [calls], 15.0)
    >>> state.last.number, state.following.number, state.seconds
    (1, 2, 5.0)
    """
    made: RecentCall | None = None
    following = list[RecentCall]()
    for calls in of_others:
        common = [each for each in calls if rank in each.call.ranks]
        known = [index for index, each in enumerate(common) if rank in each.made_by]
        count = known[-1] + 1 if known else 0
        following += common[count : count + 1]
        if known and (made is None or made.time < common[count - 1].time):
            made = common[count - 1]
    later = [each for each in following if made is None or each.time >= made.time]
    first = min(later, default=None, key=lambda each: each.time)
    state = replace(state, following=None if first is None else first.call)
    if made is None or state.entered.get(made.call.group, 0) >= made.call.number:
        return state
    return replace(
        state,
        entered={**state.entered, made.call.group: made.call.number},
        last=made.call,
        waiting=None,
        place="",
        seconds=now - made.time,
    )
