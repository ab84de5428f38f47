"""Writing on a thread of its own: one save at a time, whose error comes out at the next call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from bmt_core.checkpoint.model_state import world_group
from bmt_core.comm.objects import together


class _Save:
    def __init__(self, what: str, write: Callable[[], None]) -> None:
        self.what = what
        self.error: Exception | None = None
        self._write = write
        # No daemon: a program that ends first finishes its last checkpoint.
        self.thread = threading.Thread(target=self._run, name=f"bmt {what}")

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
            # The next call raises it; if there is none, this line is all that tells.
            print(f"bmt: {self.what} failed: {error}", file=sys.stderr, flush=True)


_under_way: _Save | None = None


def start_save(what: str, write: Callable[[], None]) -> None:
    """Run ``write`` on a thread. There must be no other under way: call :func:`wait_for_saves` first."""
    global _under_way
    assert _under_way is None
    _under_way = _Save(what, write)
    _under_way.thread.start()


def wait_for_saves() -> None:
    """Return when the last non-blocking :func:`save` is on disk; raise its error, on every rank. Collective."""
    global _under_way
    with together(world_group(), "a checkpoint in the background"):
        finished, _under_way = _under_way, None
        if finished is not None:
            finished.thread.join()
            if finished.error is not None:
                raise finished.error
