"""``RankState``: a rank's collective calls, as it writes them to the store, and what the states of
all ranks show together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective call that a rank has entered: number ``number`` (from 1) in ``group``, whose
    members are ``ranks``. ``record`` is the serial number in the rank's :class:`CallHistory`, if it
    has one.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    text: str
    record: int = 0

    def __str__(self) -> str:
        return (
            f"call {self.number} of group {self.group} (ranks"
            f" {', '.join(map(str, self.ranks))}): {self.text}"
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's calls at one moment.

    ``entered`` has the number of the last call in each group; ``last`` is the last call in any
    group; ``waiting`` is the call whose end the rank waits for. ``beat`` grows each time the state
    is written. ``stack`` is the Python stack of a rank that has entered no call since its state was
    last written. ``ended`` is None while the rank runs; afterwards it is the error that ended it,
    or empty if there was none. ``is_cut_off`` says that a connection to another rank is lost.
    ``host`` is the name of the rank's host.
    """

    beat: int = 0
    entered: Mapping[str, int] = field(default_factory=dict)
    last: Call | None = None
    waiting: Call | None = None
    stack: str = ""
    ended: str | None = None
    is_cut_off: bool = False
    host: str = ""

    def to_json(self) -> str:
        """Return the state as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        """Undo :meth:`to_json`."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("last", "waiting"):
            if fields[name] is not None:
                fields[name] = Call(**{**fields[name], "ranks": tuple(fields[name]["ranks"])})
        return cls(**fields)


def name_of_rank(rank: int, states: Mapping[int, RankState]) -> str:
    """Return what messages call a rank; with its host if ``states`` are those of several hosts.

    >>> name_of_rank(1, {0: RankState(host="node0"), 1: RankState(host="node0")})
    'rank 1'
    >>> name_of_rank(1, {0: RankState(host="node0"), 1: RankState(host="node1")})
    'rank 1 on node1'
    """
    is_named = len({state.host for state in states.values()}) > 1
    return f"rank {rank} on {states[rank].host}" if is_named else f"rank {rank}"


def missing_ranks(call: Call, states: Mapping[int, RankState]) -> list[int]:
    """Return the members of the call's group that have not entered it.

    >>> call = Call(group="dp", ranks=(0, 1), number=3, text="all_reduce")
    >>> missing_ranks(call, {0: RankState(entered={"dp": 3}), 1: RankState(entered={"dp": 2})})
    [1]
    """
    return [rank for rank in call.ranks if states[rank].entered.get(call.group, 0) < call.number]


def ring_of_waits(start: int, states: Mapping[int, RankState]) -> list[int]:
    """Return a ring of ranks in which each waits for the next and the last for the first; empty if
    ``start`` leads to none.

    A rank that is in a call waits for the members that have not entered it. If such a member is in
    another call, it cannot come before that call ends.
    """
    path: list[int] = []
    seen: set[int] = set()

    def search(rank: int) -> list[int]:
        if rank in path:
            return path[path.index(rank) :]
        waiting = states[rank].waiting
        if waiting is None or rank in seen:
            return []
        seen.add(rank)
        path.append(rank)
        for missing in missing_ranks(waiting, states):
            if ring := search(missing):
                return ring
        path.pop()
        return []

    return search(start)
