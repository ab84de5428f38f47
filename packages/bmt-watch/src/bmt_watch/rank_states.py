"""``RankState``: a rank's collective calls, as it writes them to the store, and what the states of
all ranks show together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any


@dataclass(frozen=True)
class Call:
    """A collective call that a rank has entered: number ``number`` (from 1) in ``group``, whose
    members are ``ranks``. ``record`` is the serial number in the rank's :class:`CallLog`. Number
    0: a send to, or a receive from, the others ``ranks``. ``place`` is where in the model the rank
    made the call, "in the forward of layers.3".
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    text: str
    record: int = field(default=0, compare=False)
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        text, ranks = self.text + made(self.place), ", ".join(map(str, self.ranks))
        if self.number == 0:
            return text
        return f"call {self.number} of group {self.group} (ranks {ranks}): {text}"

    def on_rank_at(self, place: str) -> str:
        """Return the call, and ``place``, where its rank is now, unless it made the call there."""
        return f"{self}{after_comma(place) if place != self.place else ''}"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Call:
        """Return the call with these ``fields``, as JSON has them."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's calls at one moment, which is ``time``.

    ``entered`` has the number of the last call in each group; ``last`` is the last call in any
    group, ``record`` that of the log; ``waiting`` is the call for whose end the rank has ``waited``
    so many seconds. ``under_way`` has the records of calls that others may not have made.
    ``on_device`` has the last call of each group that was queued on the rank's GPU, and the copies
    for which the GPU waits; ``is_idle`` says that no call has followed for long, so that the GPU
    may wait in one of these. ``shown`` counts how often the rank has shown its calls. ``beat``
    grows each time the state is written. ``stack`` is the Python stack of a rank that has entered
    no call since its state was last written. ``place`` is where in the model it computes, "in the
    forward of layers.3"; ``step`` the number of a pipeline's step; ``training_step`` that of the
    optimizer's. The last call was new ``seconds`` ago. ``given_up`` is the error for which the rank
    makes no more calls in this step, but those with the ranks ``stays_with``; empty if there is
    none. ``ended`` is None while the rank runs; afterwards it is the error that ended it, or empty
    if there was none. ``is_cut_off`` says that a connection to another rank is lost. ``host`` is
    the name of the rank's host. ``following`` is the first call that a silent rank is not known to
    have made; only readers set it.
    """

    beat: int = 0
    time: float = 0.0
    record: int = 0
    entered: Mapping[str, int] = field(default_factory=dict)
    last: Call | None = None
    waiting: Call | None = None
    waited: float = 0.0
    under_way: tuple[int, ...] = ()
    on_device: tuple[Call, ...] = ()
    is_idle: bool = False
    shown: int = 0
    stack: str = ""
    place: str = ""
    step: int = 0
    training_step: int = 1
    seconds: float = 0.0
    given_up: str = ""
    stays_with: tuple[int, ...] = ()
    ended: str | None = None
    is_cut_off: bool = False
    host: str = ""
    following: Call | None = None

    def to_json(self) -> str:
        return json.dumps(vars(self), default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        fields: dict[str, Any] = json.loads(text)
        for name in ("last", "waiting"):
            if fields[name] is not None:
                fields[name] = Call.of(fields[name])
        fields["on_device"] = tuple(map(Call.of, fields["on_device"]))
        for name in ("stays_with", "under_way"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def made(place: str) -> str:
    """Return what follows a call in messages: where in the model it was made, if that is known."""
    return f", made {place}" if place else ""


def after_comma(text: str) -> str:
    """Return ``text`` as the next part of a sentence; nothing if it is empty."""
    return f", {text}" if text else ""


def on_host(rank: int, states: Mapping[int, RankState]) -> str:
    """Return what follows the number of a rank in messages: its host if ``states`` are those of
    several hosts, else nothing.

    >>> on_host(1, {0: RankState(host="node0"), 1: RankState(host="node1")})
    ' on node1'
    """
    is_named = len({state.host for state in states.values()}) > 1
    return f" on {states[rank].host}" if is_named else ""


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """Return ``ranks``, which grow, as runs of consecutive ones: the first and the last of each.

    >>> runs_of([0, 1, 2, 3, 8])
    [[0, 3], [8, 8]]
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def ranks_of(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Undo :func:`runs_of`."""
    return tuple(rank for first, last in runs for rank in range(first, last + 1))


def missing_ranks(call: Call, states: Mapping[int, RankState]) -> list[int]:
    """Return the members of the call's group that have not entered it; those with which it sends
    or receives.

    >>> call = Call(group="dp", ranks=(0, 1), number=3, text="all_reduce")
    >>> missing_ranks(call, {0: RankState(entered={"dp": 3}), 1: RankState(entered={"dp": 2})})
    [1]
    """
    number = call.number or float("inf")
    return [rank for rank in call.ranks if states[rank].entered.get(call.group, 0) < number]


def waits(states: Mapping[int, RankState], *, transfers: bool) -> dict[int, list[int]]:
    """Return for which ranks each rank in a call waits; with ``transfers`` also in sends and
    receives, unless the other makes one with it, too.
    """
    calls = {rank: state.waiting for rank, state in states.items() if state.waiting}
    missing = {call: missing_ranks(call, states) for call in set(calls.values())}
    partners = {rank: call.ranks for rank, call in calls.items() if call.number == 0}
    return {
        rank: [p for p in missing[call] if call.number or rank not in partners.get(p, ())]
        for rank, call in calls.items()
        if transfers or call.number
    }


def awaited_ranks(call: Call, states: Mapping[int, RankState]) -> dict[int, list[int]]:
    """Return the ranks for which ``call`` waits, directly or through others, with those for which
    they wait in turn.

    >>> call = Call(group="dp", ranks=(0, 1), number=3, text="all_reduce")
    >>> other = Call(group="rows", ranks=(1, 2), number=5, text="all_gather")
    >>> waiting = RankState(entered={"rows": 5}, waiting=other)
    >>> awaited_ranks(call, {0: RankState(entered={"dp": 3}), 1: waiting, 2: RankState()})
    {1: [2], 2: []}
    """
    reached, found = missing_ranks(call, states), waits(states, transfers=True)
    for rank in reached:  # which grows
        reached += [other for other in found.get(rank, ()) if other not in reached]
    return {rank: found.get(rank, []) for rank in reached}


def ring_of_waits(found: Mapping[int, list[int]]) -> list[int]:
    """Return a ring of ranks in which each waits for the next and the last for the first, according
    to :func:`waits`; empty if there is none.

    Collectives in a ring cannot end. Of sends and receives, what one waits for may be on its way.
    """
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        ring: list[int] = error.args[1]  # of which each is awaited by the next, and the first twice
        return ring[:0:-1]
    return []
