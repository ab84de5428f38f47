"""What all blocks of a run share: the expectation of what comes next, and the gradients under way."""

from __future__ import annotations

import weakref

from torch import nn

from bmt_core.run.runtime import Runtime, current
from bmt_zero.full_gradients import InFlight
from bmt_zero.prefetch import Prefetch


class Engine:
    """Made for each run when its first block is."""

    def __init__(self, runtime: Runtime) -> None:
        self.prefetch = Prefetch(runtime.settings.prefetch_bytes)
        self.in_flight = InFlight()
        runtime.call_observers.append(self._call_begins)

    def _call_begins(self, module: nn.Module) -> None:
        if "_bmt_block" not in module.__dict__:  # a block says itself when it is used
            self.prefetch.call_begins(module)


_engines: weakref.WeakKeyDictionary[Runtime, Engine] = weakref.WeakKeyDictionary()


def engine() -> Engine:
    """Return the engine of the current run."""
    runtime = current()
    if runtime not in _engines:
        _engines[runtime] = Engine(runtime)
    return _engines[runtime]
