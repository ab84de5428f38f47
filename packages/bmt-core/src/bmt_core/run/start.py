"""The part of the start that can fail on one rank alone, left by all ranks in the same way."""

from __future__ import annotations

import json
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from bmt_core.errors import ConfigError, PluginError, RemoteError
from bmt_core.settings import Launch

_KINDS = {kind.__name__: kind for kind in (ConfigError, PluginError)}


class StartTogether:
    """Context manager: before any group exists, ranks tell each other through the store whether they got through.

    A rank that raised inside re-raises its own error; every other rank raises one of the same kind that names it.
    ``part`` names the section: each may be used once in a start.
    """

    def __init__(self, part: str, store: dist.Store | None, launch: Launch, timeout: float) -> None:
        self._part = part
        self._store = store
        self._launch = launch
        self._timeout = timedelta(seconds=timeout)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        report = json.dumps([type(error).__name__, str(error)] if error is not None else None)
        self._store.set(f"start/{self._part}/{self._launch.rank}", report)
        if error is not None:
            return
        keys = [f"start/{self._part}/{rank}" for rank in range(self._launch.world_size)]
        self._wait(self._store, keys)
        for rank, key in enumerate(keys):
            failed = json.loads(self._store.get(key))
            if failed is not None:
                name, message = failed
                where = f"Rank {rank} failed to start: "
                raise _KINDS[name](where + message) if name in _KINDS else RemoteError(f"{where}{name}: {message}")

    def _wait(self, store: dist.Store, keys: list[str]) -> None:
        try:
            store.wait(keys, self._timeout)
        except dist.DistStoreError:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            seconds = self._timeout.total_seconds()
            raise RemoteError(
                f"After {seconds:g} s these ranks have not started: {missing}. Look at their output, or raise timeout."
            ) from None
