"""``start_section``: code of ``init_distributed()`` that either succeeds on every rank or raises on
every rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from bmt_core.errors import ConfigError, PluginError, RemoteError
from bmt_core.plugins.comparison import missing_of

logger = logging.getLogger("bmt_core")

WARN_AFTER = 30.0
"""Seconds for which a rank waits before it warns and names the missing ranks."""
# Rank 0 starts to wait before others see its report, so a rank that waits this much longer than
# rank 0 gets its verdict.
_MARGIN = 1.0
_SAME_CLASS = {kind.__name__: kind for kind in (ConfigError, PluginError)}


@contextmanager
def start_section(
    name: str, store: dist.Store | None, *, rank: int, world_size: int, timeout: float
) -> Iterator[None]:
    """If the body of the ``with`` statement raises on one rank, raise on all of them.

    It is :func:`bmt_core.comm.collective_section.collective_section` for the time before there are
    groups: the ranks report through ``store``, which is None in a run of one rank. Each section of
    one start has a ``name`` of its own. A rank that does not report within ``timeout`` seconds is
    named in a :class:`RemoteError`.
    """
    if store is None:
        yield
        return
    reports = [f"start/{name}/{other}" for other in range(world_size)]
    verdict = f"start/{name}/verdict"
    try:
        yield
    except BaseException as error:
        report = json.dumps([f"Rank {rank} failed to start: ", type(error).__name__, str(error)])
        store.set(reports[rank], report)
        if rank == 0:
            store.set(verdict, report)
        raise
    store.set(reports[rank], json.dumps(None))
    # Rank 0 alone reads all reports, so that the traffic grows with the number of ranks and not
    # with its square. When the others see its report, it waits already.
    missing = missing_after(timeout, reports if rank == 0 else reports[:1], store, rank)
    if rank == 0:
        failures = [["", RemoteError.__name__, missing]]
        if not missing:
            found = [json.loads(report) for report in store.multi_get(reports)]
            failures = [failure for failure in found if failure is not None]
        store.set(verdict, json.dumps(failures[0] if failures else None))
    elif missing:
        raise RemoteError(missing)
    elif _wait(timeout + _MARGIN, [verdict], store):
        raise RemoteError("Rank 0 does not say whether all ranks have started. See its output.")
    failure = json.loads(store.get(verdict))
    if failure is not None:
        where, kind, message = failure
        if kind in _SAME_CLASS:
            raise _SAME_CLASS[kind](where + message)
        raise RemoteError(f"{where}{kind}: {message}" if where else message)


def missing_after(timeout: float, reports: list[str], store: dist.Store, rank: int) -> str:
    """Wait for the ``reports`` of the first ranks, at most for ``timeout`` seconds. Return the
    error text that names those that are missing, empty if none is.
    """
    first = min(timeout, WARN_AFTER)
    missing = _wait(first, reports, store)
    if missing and timeout > first:
        logger.warning(
            "bmt: after %g s rank %d still waits for ranks that have not started: %s.",
            first,
            rank,
            missing,
        )
        missing = _wait(timeout - first, reports, store)
    if not missing:
        return ""
    return (
        f"After {timeout:g} s these ranks have not started: {missing}. Look at their output, or"
        " raise timeout."
    )


def _wait(seconds: float, reports: list[str], store: dist.Store) -> str:
    """Wait until all ``reports`` are there, at most for ``seconds``; return the ranks of those
    that are missing.
    """
    try:
        store.wait(reports, timedelta(seconds=seconds))
    except RuntimeError as error:
        # A store in a file raises no DistStoreError when the time is over. Other DistErrors: it is
        # gone.
        if isinstance(error, dist.DistError) and not isinstance(error, dist.DistStoreError):
            raise
        return ", ".join(map(str, missing_of(reports, store)))
    return ""
