"""Threads that may still wait inside of torch when the program ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

_started = weakref.WeakSet[threading.Thread]()


def start_thread_that_may_stay(target: Callable[[], object], *, name: str) -> threading.Thread:
    """Run ``target`` in a thread for whose end the program does not wait, even if it waits inside
    of torch for a host that has vanished.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


@atexit.register
def _end_beside_threads() -> None:
    """End the process here if an error ends the program and such a thread still waits.

    Python ends a daemon thread that comes back from C++ while the interpreter is taken apart, which
    torch's functions do not allow: the process would abort. This is registered when bmt is
    imported, so functions that are registered later run before it.
    """
    if hasattr(sys, "last_value") and any(thread.is_alive() for thread in list(_started)):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
