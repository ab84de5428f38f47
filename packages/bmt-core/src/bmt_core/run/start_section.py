"""``start_section``: code of ``init_distributed()`` that either succeeds on every rank or raises on
every rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bmt_core.errors import BmtError, ConfigError, PluginError, RemoteError

logger = logging.getLogger("bmt_core")

WARN_AFTER = 30.0
"""Seconds for which a rank waits before it warns and names the missing ranks."""
# Rank 0 has begun to wait when others see its report, so a rank that waits this much longer than
# rank 0 gets its verdict.
_MARGIN = 1.0
_NO_VALUE = "-"
_SAME_CLASS = {kind.__name__: kind for kind in (ConfigError, PluginError)}


class SectionReports:
    """What ranks tell each other at the end of a section: the body sets ``own``, and ``judge`` gets
    those of all ranks. Afterwards ``found`` is what ``judge`` returned. All go through JSON.
    """

    own: Any = None
    found: Any = None


@contextmanager
def start_section(
    name: str,
    store: dist.Store | None,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    judge: Callable[[list[Any]], object] = lambda reports: None,
) -> Iterator[SectionReports]:
    """If the body of the ``with`` statement raises on one rank, raise on all of them.

    It is :func:`bmt_core.comm.collective_section.collective_section` for the time before there are
    groups: the ranks report through ``store``, which is None in a run of one rank. Each section of
    one start has a ``name`` of its own. A rank whose body fails because another has failed, and has
    closed its connections, raises the failure of that one, which told it before it closed them. A
    rank that does not report within ``timeout`` seconds is named in a :class:`RemoteError`. When
    all have succeeded, rank 0 calls ``judge``; the :class:`ConfigError` or :class:`PluginError`
    that it raises is raised on every rank.
    """
    results = SectionReports()
    if store is None:
        yield results
        return
    reports = [f"start/{name}/{other}" for other in range(world_size)]
    verdict = f"start/{name}/verdict"
    try:
        yield results
    except BaseException as error:
        own = [f"Rank {rank} failed to start: ", type(error).__name__, str(error)]
        first = store.compare_set(f"start/{name}/failure", "", json.dumps(own)).decode()
        # An error of bmt is about this rank, and one of gloo or torch may be about any.
        is_own = isinstance(error, BmtError) and not isinstance(error, RemoteError)
        failure = own if is_own or not isinstance(error, Exception) else json.loads(first)
        store.set(reports[rank], json.dumps([failure, None]))
        if rank == 0:
            store.set(verdict, json.dumps([failure, None]))
        if failure[1:] != own[1:]:
            raise _error_of(failure) from None
        raise
    store.set(reports[rank], json.dumps([None, results.own]))
    # Rank 0 alone reads all reports, so that the traffic grows with the number of ranks and not
    # with its square. The others wait for its verdict.
    if rank == 0:
        failure = ["", RemoteError.__name__, missing_after(timeout, reports, store, rank)]
        found = [failure, None] if failure[-1] else _verdict_on(store.multi_get(reports), judge)
        said = json.dumps(found)
        store.set(verdict, said)
    else:
        missing = missing_after(timeout, reports[:1], store, rank, awaited=[verdict])
        if missing:
            raise RemoteError(missing)
        said = read(verdict, store)
        # Without a verdict, rank 0 has reported, and may wait for the others.
        if not said and _have_come([verdict], timeout + _MARGIN, store):
            said = read(verdict, store)
        if not said:
            raise RemoteError("Rank 0 does not say whether all ranks have started. See its output.")
    failure, results.found = json.loads(said)
    if failure is not None:
        raise _error_of(failure)


def _error_of(failure: Sequence[str]) -> BmtError:
    """Return the error for the failure of another rank."""
    where, kind, message = failure
    if kind in _SAME_CLASS:
        return _SAME_CLASS[kind](where + message)
    return RemoteError(f"{where}{kind}: {message}" if where else message)


def _verdict_on(reports: Sequence[bytes], judge: Callable[[list[Any]], object]) -> list[Any]:
    """Return the first failure, or None, and what ``judge`` returns if there is none."""
    of_ranks = [json.loads(report) for report in reports]
    if failures := [failure for failure, _ in of_ranks if failure is not None]:
        return [failures[0], None]
    try:
        return [None, judge([own for _, own in of_ranks])]
    except (ConfigError, PluginError) as error:
        return [["", type(error).__name__, str(error)], None]
    except Exception as error:  # another version of bmt-core may have written a report
        return [["Rank 0 cannot compare the ranks: ", type(error).__name__, str(error)], None]


def read(key: str, store: dist.Store) -> str:
    """Return the value of ``key``, empty if there is none. It is one request, and ``get`` is two of
    torch's ``TCPStore``, which waits for the key first.
    """
    found = store.compare_set(key, _NO_VALUE, _NO_VALUE).decode()
    return "" if found == _NO_VALUE else found


def missing_after(
    timeout: float,
    reports: list[str],
    store: dist.Store,
    rank: int,
    *,
    awaited: list[str] | None = None,
) -> str:
    """Wait for the ``reports`` of the first ranks, or for the keys ``awaited`` that follow them, at
    most for ``timeout`` seconds. Return the error text that names the ranks whose reports are
    missing, empty if none is.
    """
    awaited = reports if awaited is None else awaited
    first = min(timeout, WARN_AFTER)
    if _have_come(awaited, first, store):
        return ""
    missing = missing_of(reports, store)
    if timeout > first:
        if missing:
            logger.warning(
                "bmt: after %g s rank %d still waits for ranks that have not started: %s.",
                first,
                rank,
                missing,
            )
        if _have_come(awaited, timeout - first, store):
            return ""
        missing = missing_of(reports, store)
    if not missing:
        return ""
    return (
        f"After {timeout:g} s these ranks have not started: {missing}. Look at their output, or"
        " raise timeout."
    )


def _have_come(keys: list[str], seconds: float, store: dist.Store) -> bool:
    """Wait until all ``keys`` are there, at most for ``seconds``; return whether they are."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        # A store in a file raises no DistStoreError when the time is over. Other DistErrors: it is
        # gone.
        if isinstance(error, dist.DistError) and not isinstance(error, dist.DistStoreError):
            raise
        return False
    return True


def missing_of(keys: Sequence[str], store: dist.Store, first: int = 0) -> str:
    """Return the indices, counted from ``first``, of the ``keys`` that ``store`` lacks, as text. It
    asks for all, then for halves: about 2 log2(len(keys)) requests for each that is missing.
    """
    if store.check(list(keys)):
        return ""
    half = len(keys) // 2
    if half == 0:
        return str(first)
    of_halves = missing_of(keys[:half], store, first), missing_of(keys[half:], store, first + half)
    return ", ".join(filter(None, of_halves))
