"""``RunEnd``: why the run has ended, the same on every rank."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist

from bmt_core.comm.annotate import PLACES
from bmt_core.comm.observer import ObserverContext
from bmt_core.errors import CallError
from bmt_watch.rank_states import Call, after_comma

logger = logging.getLogger("bmt_core")
END, FAREWELL = "end", "farewell"
"""The key of the first failure of the run in the store, or of the farewell of the rank that served
the store.
"""


class RunEnd:
    """The first failure of the run, which this rank finds or learns of."""

    def __init__(self, context: ObserverContext) -> None:
        self.failure: str | None = None
        """None while there is none. After it every call raises."""
        self.store_is_gone = False
        """Whether the rank that served the store has left, so that calls cannot be compared
        any more.
        """
        self.has_left = False
        """Whether this rank has left the run, so that its calls are not observed any more."""
        self.is_known = threading.Event()
        """Set once there is a failure, or none can be learned of any more."""
        self.wake = threading.Event()
        """Makes the watch learn of a failure at once."""
        self.functions: list[Callable[[str], None]] = []
        """Called with the failure of the run, once: they end what this rank's GPU waits for."""
        self.rank = context.rank
        self._on_host = f" on {socket.gethostname()}" if context.has_several_hosts else ""

    def fail(self, failure: str, store: dist.Store) -> None:
        """Make the calls of all ranks fail; the first failure is kept."""
        try:
            first = store.compare_set(END, "", failure).decode()
            failure = failure if first == FAREWELL else first
        except dist.DistError:
            # Whoever served the store has left, and the others learn it from their connections.
            pass
        self.failure = failure
        self.is_known.set()
        self.wake.set()

    def fail_because_of(self, error: str, store: dist.Store) -> None:
        """Make the calls of all ranks fail, because ``error`` ends this one."""
        where = after_comma(PLACES.now)
        self.fail(f"Rank {self.rank}{self._on_host} has failed ({error}){where}.", store)

    def raise_failure(self, call: Call | str | None = None) -> None:
        """Raise :class:`CallError` if the calls of the run have failed, here or elsewhere. ``call``
        is what this rank is in.
        """
        if self.failure is not None:
            raise CallError(self.failure) if call is None else self.error_in(call, self.failure)

    def error_in(self, call: Call | str, why: str) -> CallError:
        """Return the error ``why``, and which rank this is, in which ``call``, and where in the
        model, unless ``why`` names the call.
        """
        where = "" if str(call) in why else f", in {and_place(call)}"
        return CallError(f"{why} This is rank {self.rank}{where}.")

    def end_on_device(self, failure: str) -> None:
        """End what the GPU waits for, once."""
        functions, self.functions = self.functions, []
        for function in functions:
            try:
                function(failure)
            except Exception as error:
                logger.warning("bmt: calls on the GPU of rank %d go on: %s", self.rank, error)


def and_place(call: Call | str) -> str:
    """Return ``call``, and where in the model this rank is now."""
    place = PLACES.now
    return call.on_rank_at(place) if isinstance(call, Call) else f"{call}{after_comma(place)}"
