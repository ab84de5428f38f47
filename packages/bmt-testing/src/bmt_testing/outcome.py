"""``Outcome``: how a function ended on one rank, and ``RankFailure``, the error that reports the
outcomes of all ranks.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple


class RankError(NamedTuple):
    """The name of an error's class and its message."""

    type_name: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank returned, or how it failed.

    ``error_type`` is None for a rank that returned. Otherwise it is the name of the exception's
    class, ``"Hung"`` for a rank that was killed after its time, or ``"Died"`` for one whose process
    ended. ``error`` is the exception, if it can be pickled. ``traceback`` is its text, or the
    stacks of a hung rank's threads.
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    error_message: str = ""
    traceback: str = ""
    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank did not return."""
        return self.error_type is not None

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Outcome:
        """Return the outcome of ``rank``, whose function raised ``error``."""
        return cls(
            rank=rank,
            error_type=type(error).__name__,
            error_message=str(error),
            traceback="".join(
                traceback.format_exception(
                    type(error), error, _from_the_function(error.__traceback__)
                )
            ),
            error=error if _survives_pickling(error) else None,
        )


class RankFailure(Exception):
    """At least one rank failed. The message says what happened on every rank.

    ``outcomes`` has one entry per rank, ``errors`` the class name and message of each rank
    that failed.
    """

    def __init__(self, function: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.errors = {
            outcome.rank: RankError(outcome.error_type, outcome.error_message)
            for outcome in outcomes
            if outcome.error_type is not None
        }
        super().__init__(_report(function, self.outcomes))


def _report(function: str, outcomes: Sequence[Outcome]) -> str:
    """Return one line per rank, then the tracebacks, those that are equal but for addresses
    only once.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    lines = [f"{function} failed on {len(failed)} of {len(outcomes)} ranks."]
    for outcome in outcomes:
        # The rest of a long message, as of an assert, is in the traceback.
        message = (
            outcome.error_message.partition("\n")[0] if outcome.traceback else outcome.error_message
        )
        result = f"{outcome.error_type}: {message}" if outcome.failed else "returned"
        lines.append(f"  rank {outcome.rank}: {result}")
    ranks_of: dict[str, list[int]] = {}
    for outcome in failed:
        ranks_of.setdefault(re.sub("0x[0-9a-f]+", "0x…", outcome.traceback), []).append(
            outcome.rank
        )
    for text, ranks in ranks_of.items():
        if text:
            lines += ["", f"----- rank {', '.join(map(str, ranks))} -----", text.rstrip()]
    return "\n".join(lines)


def _from_the_function(full: TracebackType | None) -> TracebackType | None:
    """Return ``full`` without its first frames, which called the function that failed."""
    rest = full
    while rest is not None and rest.tb_frame.f_globals.get("__package__") == __package__:
        rest = rest.tb_next
    return rest or full


def _survives_pickling(error: BaseException) -> bool:
    # An exception whose __init__ takes other arguments than its `args` can be pickled, and fails to
    # be unpickled.
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
