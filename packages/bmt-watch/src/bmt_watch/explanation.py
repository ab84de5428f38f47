"""``StuckCalls``: reads what all ranks have written of their calls, and finds out why calls do not
end. ``bmt hang`` explains what ranks have recorded in the same sentences.

[Note: the last call of a silent rank] A rank writes its state once in a period, and may make many
calls before it is killed. But all ranks make the same calls in the same order. So a rank that waits
shows its last calls: which of them have ended, which all members have made, and which rank made
each one first. The silent rank has made all of these up to some call, and probably not the next
one; but for some calls, such as reductions of gradients, nobody waits at once, so it may have made
the next one, too, and more.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from bmt_watch.call_log import LoggedCall, RankCalls, first_difference
from bmt_watch.rank_states import (
    Call,
    RankState,
    after_comma,
    awaited_ranks,
    missing_ranks,
    on_host,
    ring_of_waits,
    waits,
)

_ONLY_SOME = (
    "look for what only some ranks do, such as save(), state_dict(), print(weight) or a forward"
    " behind `if rank() == 0`"
)
ADVICE = (
    "All ranks of a group must make the same calls in the same order: "
    f"{_ONLY_SOME}, and for a loop that has fewer batches on some ranks."
)
_ENDED_EARLY = (
    "If its loop had fewer batches, give every rank the same number of them, for example by"
    f" DistributedSampler; else {_ONLY_SOME}."
)
SILENCE = (
    "Nothing was heard of {} for {:.0f} s: its process, its host or the network between has failed,"
    " or it is stopped."
)
MAY_BE_FURTHER = "It may have come further than it has told."
# What is written of all calls that do not end is read by all ranks in them, so it stays short.
_CALLS, _RANKS = 16, 8
_STACKS = 2  # of so many missing ranks a text shows the innermost calls


class Findings(NamedTuple):
    """What one look at all ranks has found. ``number`` counts the looks. ``failure`` is why the run
    cannot go on; None if nothing shows that. ``missing`` says of each call, by group and number,
    for which ranks it waits. ``difference`` says which calls on GPUs that have stopped are not the
    same on all ranks; empty if that is not known.
    """

    number: int = 0
    failure: str | None = None
    missing: Mapping[str, str] = MappingProxyType({})
    difference: str = ""

    def of(self, call: Call) -> str:
        """Return for whom ``call`` waits, as a text; empty if that is not known."""
        return self.missing.get(_key(call), "")

    def to_json(self) -> str:
        return json.dumps(self._replace(missing=dict(self.missing)))

    @classmethod
    def from_json(cls, text: str | bytes) -> Findings:
        return cls(*json.loads(text))


class StuckCalls:
    """Looks at the calls of all ranks, one after another time. ``longest_silence`` is after how
    many seconds without a new state a rank has failed or is stopped.
    """

    def __init__(self, store: dist.Store, world_size: int, longest_silence: float) -> None:
        self.has_lost_connections = False
        """Whether some rank has lost its connection to another, in the last look."""
        self._store = store
        self._keys = [state_key(rank) for rank in range(world_size)]
        self._longest_silence = longest_silence
        self._looks = 0
        # Of ranks that may stay so for ever: what they wait for and why they have given up, and at
        # which beats that was first seen.
        self._seen: dict[str, tuple[object, dict[int, int]]] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # the last beats, and when each was new
        self._shown: dict[int, tuple[int, bytes]] = {}  # how often, and the calls

    def look(self) -> Findings:
        """Read the states of all ranks, and return what they show."""
        states = dict(enumerate(map(RankState.from_json, self._store.multi_get(self._keys))))
        self._looks += 1
        self.has_lost_connections = any(state.is_cut_off for state in states.values())
        silent = self._silences(states)
        states.update(self._last_known(states, silent))
        stuck: dict[str, tuple[int, Call]] = {}  # the first rank in each call
        for rank, state in states.items():
            if state.waiting is not None:
                stuck.setdefault(_key(state.waiting), (rank, state.waiting))
        for rank, state in states.items():
            for call in state.on_device if state.is_idle and state.ended is None else ():
                if missing_ranks(call, states):
                    stuck.setdefault(_key(call), (rank, call))
        failure = ended_text(states, stuck.values()) or self._given_up_text(states)
        failure = failure or self._ring_text(states)
        if failure is None and self.has_lost_connections:
            failure = _dead(states, silent)
        texts = {
            key: missing_text(call, states, silent)
            for key, (_, call) in list(stuck.items())[:_CALLS]
        }
        # Of the calls that ranks have shown whose GPUs may wait.
        idle = [
            rank for rank, each in states.items() if each.is_idle and each.shown and not failure
        ]
        difference = first_difference(self._calls_of(idle, states))
        return Findings(self._looks, failure, texts, difference)

    def _calls_of(self, ranks: Iterable[int], states: Mapping[int, RankState]) -> list[RankCalls]:
        """Return the calls that ``ranks`` have shown."""
        known, shown = self._shown, {rank: states[rank].shown for rank in ranks}
        new = [rank for rank, count in shown.items() if known.get(rank, (0, b""))[0] != count]
        if new:
            found = self._store.multi_get([calls_key(rank) for rank in new])
            known.update({rank: (shown[rank], data) for rank, data in zip(new, found, strict=True)})
        return [RankCalls(zlib.decompress(known[rank][1])) for rank in shown]

    def _last_known(
        self, states: Mapping[int, RankState], silent: Mapping[int, float]
    ) -> dict[int, RankState]:
        """Return the states of ``silent`` ranks, with what ranks know that wait for them."""
        waiting = [
            (rank, state.waiting)
            for rank, state in states.items()
            if state.shown
            and state.waiting is not None
            and not silent.keys().isdisjoint(state.waiting.ranks)
        ]
        if not waiting:
            return {}
        shown = self._calls_of([rank for rank, _ in waiting[:_RANKS]], states)
        step, known = max(states[rank].training_step for rank, _ in waiting), {}
        for rank in silent:
            of_others = [each.calls for each in shown]
            state = last_known(rank, states[rank], of_others, time.time())
            of_rank = [call for _, call in waiting if call.number == 0 and rank in call.ranks]
            following = state.following
            if of_rank and (following is None or not following.place):
                # A call outside of the model says less than what a stage has not sent or taken,
                # made at a place of the other's.
                following = replace(of_rank[0], place="")
            known[rank] = replace(state, following=following, training_step=step)
        return known

    def _silences(self, states: Mapping[int, RankState]) -> dict[int, float]:
        """Return for how many seconds ranks have written nothing, where that is too long."""
        now = time.monotonic()
        for rank, state in states.items():
            if rank not in self._heard or self._heard[rank][0] != state.beat:
                self._heard[rank] = state.beat, now
        silences = {rank: now - since for rank, (_, since) in self._heard.items()}
        return {rank: each for rank, each in silences.items() if each >= self._longest_silence}

    def _have_stayed(
        self, kind: str, ranks: Iterable[int], states: Mapping[int, RankState]
    ) -> bool:
        """Return whether there are ``ranks``, and each has written twice since it was first seen
        that they may stay so for ever, and still does.
        """
        own = {rank: states[rank] for rank in ranks}
        calls = [
            (rank, each.waiting, each.waiting and each.waiting.record, each.given_up)
            for rank, each in own.items()
        ]
        if kind not in self._seen or self._seen[kind][0] != calls:
            self._seen[kind] = calls, {rank: each.beat for rank, each in own.items()}
        beats = self._seen[kind][1]
        return bool(beats) and all(states[rank].beat >= beats[rank] + 2 for rank in beats)

    def _ring_text(self, states: Mapping[int, RankState]) -> str | None:
        ring = ring_of_waits(waits(states, transfers=False))
        if not self._have_stayed("ring", ring, states):
            return None
        return f"Ranks wait for each other in different calls: {_ring_text(ring, states)}. {ADVICE}"

    def _given_up_text(self, states: Mapping[int, RankState]) -> str | None:
        """Return for which rank that has given up another one, or its GPU, waits in the same
        step.
        """
        found = (
            (missing, rank, call)
            for rank, state in states.items()
            for call in (state.waiting, *state.on_device)
            if call is not None
            for missing in missing_ranks(call, states)
            if states[missing].given_up
            and states[missing].step == state.step
            and not {rank, *call.ranks} <= {*states[missing].stays_with}
        )
        missing, rank, call = next(found, (0, 0, None))
        if not self._have_stayed("given up", () if call is None else (missing, rank), states):
            return None
        why, where = states[missing].given_up, after_comma(states[missing].place)
        name = f"Rank {missing}{on_host(missing, states)}"
        return f"{name} has failed ({why}){where}, and rank {rank} waits for it in {call}."


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


def state_key(rank: int) -> str:
    """Return where in the store the :class:`RankState` of ``rank`` is."""
    return f"state/{rank}"


def calls_key(rank: int) -> str:
    """Return where in the store the calls are that ``rank`` has shown."""
    return f"calls/{rank}"


def _key(call: Call) -> str:
    return f"{call.group} {call.ranks[0]} {call.number}"


def ended_text(states: Mapping[int, RankState], waits: Iterable[tuple[int, Call]]) -> str | None:
    """Return which rank has ended while another one waits for it, if one of ``waits``, a rank and
    its call, shows that.
    """
    for rank, call in waits:
        if call.number == 0:  # what the other has sent before it ended may be on its way
            continue
        for missing in missing_ranks(call, states):
            if states[missing].ended is not None:
                return _ended_while(missing, states, f"rank {rank} waits for it in {call}.")
    return None


def _dead(states: Mapping[int, RankState], silent: Mapping[int, float]) -> str | None:
    for rank, state in states.items():
        if state.ended is not None:
            return _ended_while(rank, states, "others still wait for it.")
    if not silent:
        return None
    dead = " and ".join(f"{_named([rank], states)}," for rank in silent)
    return (
        f"The process of {dead} was killed or has crashed, or is stopped: it did not say that it"
        f" leaves. {MAY_BE_FURTHER}"
    )


def missing_text(call: Call, states: Mapping[int, RankState], silent: Mapping[int, float]) -> str:
    """Return for which ranks ``call`` waits, and where they are. ``silent`` has for how many
    seconds ranks were not heard of.
    """
    awaited = awaited_ranks(call, states)
    # A rank that is silent may have entered the call, and sends nothing.
    missing = missing_ranks(call, states) or [rank for rank in call.ranks if rank in silent]
    ends = sorted(rank for rank, others in awaited.items() if not others)
    last = [rank for rank in ends if rank not in missing]
    texts = [f"It waits for {_named(missing, states, call.group)}."] if missing else []
    if last:
        texts.append(f"Through others it waits for {_named(last, states)}.")
    elif not ends and (ring := ring_of_waits(awaited)):
        in_ring = _ring_text(ring, states)
        texts.append(f"Ranks wait for each other, if nothing is on its way: {in_ring}.")
    texts += [
        f"{SILENCE.format(f'rank {rank}{on_host(rank, states)}', silent[rank])} {MAY_BE_FURTHER}"
        for rank in [rank for rank in sorted({*call.ranks, *last}) if rank in silent][:_RANKS]
    ]
    return " ".join(texts) + "".join(
        f"\nRank {rank} is now here (most recent call last):\n{states[rank].stack}"
        for rank in [*last, *missing][:_STACKS]
        if states[rank].stack
    )


def _named(ranks: Sequence[int], states: Mapping[int, RankState], group: str = "") -> str:
    named = [
        f"{f'rank {rank}{on_host(rank, states)}'}, {_whereabouts(states[rank], group)}"
        for rank in ranks
    ]
    more = [f"and {len(named) - _RANKS} more ranks"] if len(named) > _RANKS else []
    return "; ".join(named[:_RANKS] + more)


def _ended_while(rank: int, states: Mapping[int, RankState], others: str) -> str:
    """Return the failure of a rank that has ended while ``others`` wait: with its error and where
    in the model that was, or, without an error, when.
    """
    state, host = states[rank], on_host(rank, states)
    if state.ended:
        why = f" ({state.ended}){after_comma(state.place)}"
        return f"Rank {rank}{host} has ended{why}, and {others}"
    steps = state.training_step - 1
    when = f" after {steps} step{'s' * (steps > 1)}" if steps else ""
    return f"Rank {rank}{host} has ended{when}, and {others} {_ENDED_EARLY}"


def _whereabouts(state: RankState, group: str) -> str:
    """Return what a rank does: in what it waits, or its last call, of ``group`` if that was on
    its GPU.
    """
    place, following = after_comma(state.place), state.following
    before = ""
    if following not in (None, state.waiting):
        before = f", {'before' if following.number else 'and which others await in'} {following}"
    if state.waiting is not None:
        return f"which is in {state.waiting.on_rank_at(state.place)}{before}"
    last = next((call for call in state.on_device if call.group == group), state.last)
    if last is None:
        return f"which has entered no call{before.replace(',', '', 1) or ' yet'}{place}"
    when = f"it has made none for {state.seconds:.0f} s, and is in step {state.training_step}"
    return f"whose last call was {last} ({when}){place}{before}"


def _ring_text(ring: list[int], states: Mapping[int, RankState]) -> str:
    texts = []
    for rank, other in zip(ring, [*ring[1:], *ring[:1]], strict=True):
        why = f"which rank {other} has not entered"
        if (call := states[rank].waiting) and call.number == 0:
            why = f"and waits for rank {other}"
        texts.append(f"rank {rank} is in {call}, {why}")
    return "; ".join(texts)
