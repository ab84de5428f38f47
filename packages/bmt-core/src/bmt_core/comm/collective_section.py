"""``collective_section``: code that either succeeds on every rank of a group or raises on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bmt_core.comm.annotate import annotate
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError, CallError, RemoteError


class SectionResults:
    """Objects exchanged at the end of a section: the body sets ``own``; afterwards ``of_ranks`` has
    those of all ranks.
    """

    def __init__(self) -> None:
        self.own: Any = None
        self.of_ranks: list[Any] = []


@contextmanager
def collective_section(group: Group, what: str) -> Iterator[SectionResults]:
    """If the body of the ``with`` statement raises on one rank of ``group``, raise on all of them.
    Collective at its end.

    A rank whose body failed raises its own error. The others raise an error that names the failed
    rank and ``what``: of the same class if that is one of bmt's, otherwise a :class:`RemoteError`,
    as when a rank died. A :class:`CallError` of the body is raised at once. The body must not call
    a collective after a point where a single rank can fail. Ranks can exchange small objects: see
    :class:`SectionResults`.
    """
    failure: Exception | None = None
    results = SectionResults()
    try:
        yield results
    except CallError:
        raise  # the exchange would fail as well, after as long a wait
    except Exception as error:
        failure = error
    kind = type(failure) if isinstance(failure, BmtError) else None
    report = None if failure is None else (kind, type(failure).__name__, str(failure))
    try:
        with annotate(f"at the end of {what}", is_compared=False):
            reports = all_gather_object((report, results.own), group)
    except RemoteError as error:  # the connection to a rank broke
        if kind is not None and failure is not None:
            raise failure from failure.__cause__  # not from the failure of the exchange
        if isinstance(error, CallError):  # its message names the ranks and their calls
            raise error from failure
        raise RemoteError(f"{what}: {error}") from failure
    if failure is not None:
        raise failure
    for rank, (found, _) in zip(group.ranks, reports, strict=True):
        if found is not None:
            kind, name, message = found
            where = f"Rank {rank} failed in {what}: "
            raise (
                RemoteError(f"{where}{name}: {message}") if kind is None else kind(where + message)
            )
    results.of_ranks = [own for _, own in reports]
