"""The thread that updates parameters on the host: one per process, started once, with threads of
its own for the kernels.

[Note: threads of a rank] A rank works on the cores that it may run on. If the launcher has bound it
to some cores, these are its own. If it may run on all cores of its launcher, it shares them with
the other ranks of the node, and takes an equal part. Of four or more cores, one is left to the
thread that launches work on the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from bmt_core.errors import ConfigError
from bmt_core.launch import Launch

VARIABLE = "BMT_OFFLOAD_THREADS"
Result = TypeVar("Result")
_lock = threading.Lock()
_executors: list[ThreadPoolExecutor] = []


def submit(work: Callable[[], Result]) -> Future[Result]:
    """Call ``work`` on the thread, after all that was submitted before. The program waits for it
    before it exits.
    """
    with _lock:
        if not _executors:
            _executors.append(_start())
        return _executors[0].submit(work)


def number_of_threads() -> int:
    """Return ``BMT_OFFLOAD_THREADS``, or this rank's share of the cores."""
    if given := os.environ.get(VARIABLE):
        if not given.isdecimal() or not int(given):
            raise ConfigError(f"{VARIABLE} must be a number of threads, 1 or more, not {given!r}.")
        return int(given)
    own = _cores(0)
    return threads_of(own, _cores(os.getppid()) or own, Launch.from_env().local_world_size)


def threads_of(own: int, of_launcher: int, ranks: int) -> int:
    """Return the number of threads for one of ``ranks`` ranks; it may use ``own`` cores, its
    launcher ``of_launcher``.

    See [Note: threads of a rank].

    >>> threads_of(16, 16, 1), threads_of(16, 16, 4), threads_of(8, 32, 4), threads_of(1, 2, 4)
    (15, 3, 7, 1)
    """
    share = max(1, min(own, max(own, of_launcher) // ranks))
    return share - 1 if share >= 4 else share


def _start() -> ThreadPoolExecutor:
    before = torch.get_num_threads()
    # set_num_threads() sets the number for the calling thread and for later threads; the latter is
    # undone below.
    executor = ThreadPoolExecutor(1, "bmt-offload", torch.set_num_threads, (number_of_threads(),))
    executor.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)
    return executor


def _cores(process: int) -> int:
    """Return how many cores ``process`` may run on; 0 if that is not known. Process 0 is this one,
    for which it is always known.
    """
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # not Linux, or a launcher that this process cannot see
        return 0 if process else os.cpu_count() or 1


# A forked child has the executor but not its thread.
os.register_at_fork(after_in_child=_executors.clear)
