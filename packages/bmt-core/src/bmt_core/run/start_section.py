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

logger = logging.getLogger("bmt_core")

WARN_AFTER = 30.0
"""Seconds for which a rank waits before it warns and names the missing ranks."""
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
    keys = [f"start/{name}/{other}" for other in range(world_size)]
    try:
        yield
    except BaseException as error:
        store.set(keys[rank], json.dumps([type(error).__name__, str(error)]))
        raise
    store.set(keys[rank], json.dumps(None))
    first = min(timeout, WARN_AFTER)
    missing = _missing_after(first, keys, store)
    if missing and timeout > first:
        logger.warning(
            "bmt: after %g s rank %d still waits for ranks that have not started: %s.",
            first,
            rank,
            missing,
        )
        missing = _missing_after(timeout - first, keys, store)
    if missing:
        raise RemoteError(
            f"After {timeout:g} s these ranks have not started: {missing}. Look at their output, or"
            " raise timeout."
        )
    # One request, where each rank reads what all have written.
    reports: list[bytes] = store.multi_get(keys)
    for other, report in enumerate(reports):
        failure = json.loads(report)
        if failure is not None:
            kind, message = failure
            where = f"Rank {other} failed to start: "
            raise (
                _SAME_CLASS[kind](where + message)
                if kind in _SAME_CLASS
                else RemoteError(f"{where}{kind}: {message}")
            )


def _missing_after(seconds: float, keys: list[str], store: dist.Store) -> str:
    """Wait until all ``keys`` are there, at most for ``seconds``; return the ranks of those that
    are missing.
    """
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:
        return ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
    return ""
