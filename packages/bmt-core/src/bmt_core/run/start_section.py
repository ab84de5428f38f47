"""``start_section``: code of ``init_distributed()`` that either succeeds on every rank or raises on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from bmt_core.errors import ConfigError, PluginError, RemoteError

_SAME_CLASS = {kind.__name__: kind for kind in (ConfigError, PluginError)}


@contextmanager
def start_section(name: str, store: dist.Store | None, *, rank: int, world_size: int, timeout: float) -> Iterator[None]:
    """If the body of the ``with`` statement raises on one rank, raise on all of them.

    It is :func:`bmt_core.comm.collective_section.collective_section` for the time before there are groups: the ranks report
    through ``store``, which is None in a run of one rank. ``name`` is that of no other section of the same start. A rank that
    does not report within ``timeout`` seconds is named in a :class:`RemoteError`.
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
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError:
        missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise RemoteError(
            f"After {timeout:g} s these ranks have not started: {missing}. Look at their output, or raise timeout."
        ) from None
    for other, key in enumerate(keys):
        failure = json.loads(store.get(key))
        if failure is not None:
            kind, message = failure
            where = f"Rank {other} failed to start: "
            raise (
                _SAME_CLASS[kind](where + message) if kind in _SAME_CLASS else RemoteError(f"{where}{kind}: {message}")
            )
