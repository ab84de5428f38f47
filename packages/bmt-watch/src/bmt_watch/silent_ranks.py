"""``last_known``: what other ranks know of the last calls of one that is killed or stopped.

[Note: the last call of a silent rank] A rank writes its state once in a period, and may make many
calls before it is killed. But all ranks make the same calls in the same order. So a rank that waits
shows its last calls: which of them have ended, which all members have made, and which rank made
each one first. The silent rank has made all of these up to some call, and probably not the next
one; but for some calls, such as reductions of gradients, nobody waits at once, so it may have made
the next one, too, and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bmt_watch.call_log import LoggedCall
from bmt_watch.rank_states import RankState


def last_known(
    rank: int, state: RankState, of_others: Iterable[Sequence[LoggedCall]], now: float
) -> RankState:
    """Return ``state``, of the silent ``rank``, with its last call and the next one, as far as
    others know: see [Note: the last call of a silent rank].

    >>> from bmt_watch.rank_states import Call
    >>> one, two = (Call("dp", (0, 1), number, "all_reduce") for number in (1, 2))
    >>> calls = LoggedCall(one, "", 10.0, 1, (0, 1)), LoggedCall(two, "", 11.0, 1, (0,))
    >>> state = last_known(1, RankState(), [calls], 15.0)
    >>> state.last.number, state.following.number, state.seconds
    (1, 2, 5.0)
    """
    made: LoggedCall | None = None
    following = list[LoggedCall]()
    for calls in of_others:
        common = [each for each in calls if each.made_by is not None and rank in each.call.ranks]
        known = [index for index, each in enumerate(common) if rank in (each.made_by or ())]
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
