"""``Herald``: announces a rank's failure to all others, through the rendezvous store."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from torch.distributed import DistError

if TYPE_CHECKING:
    from torch.distributed import Store

    from bmt_kernels._nccl import Engine

logger = logging.getLogger("bmt_kernels")
_KEY = "nccl-native/failure"
# Seconds between two looks at the store. Each is one request to its server per rank.
_PERIOD = 1.0


class Herald(threading.Thread):
    """Writes this rank's first failure into the store, and ends this rank's communication when
    another rank has failed.

    Without it every rank would fail at its own timeout, and none would know where the
    failure began.
    """

    def __init__(self, engine: Engine, store: Store, rank: int) -> None:
        super().__init__(name="bmt-nccl-herald", daemon=True)
        self._engine = engine
        self._store = store
        self._rank = rank

    def run(self) -> None:
        """Look for failures until there is one, the engine is closed, or the store is gone."""
        try:
            while not self._look():
                pass
        except DistError as error:
            # The rank that serves the store may leave first: nobody waits at the end.
            logger.debug(
                "bmt: rank %d cannot look for failures of other ranks any more: %s",
                self._rank,
                error,
            )

    def _look(self) -> bool:
        own = self._engine.wait_for_failure(_PERIOD)
        if own is not None:
            if not self._store.check([_KEY]):
                self._store.set(_KEY, f"rank {self._rank} failed: {own}")
            return True
        if self._engine.is_closed:
            return True
        if self._store.check([_KEY]):
            self._engine.fail(
                f"NCCL was aborted on rank {self._rank}, as {self._store.get(_KEY).decode()}"
            )
            return True
        return False
