"""Saving on a thread, one save at a time. If a save fails, the next save or load raises
its error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError, CheckpointError
from bmt_core.run.runtime import current, is_initialized, world_group
from bmt_core.run.topology import BESIDE_THE_PROGRAM
from bmt_params.uninitialized import off_meta_device

T = TypeVar("T")


class _Save:
    def __init__(self, what: str, write: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self.what = what
        self._write = write
        # Not a daemon: a program that ends meanwhile waits for its last checkpoint.
        self.thread = threading.Thread(target=self._run, name=f"bmt {what}")

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
            # Printed too, because the program may make no further call that would raise it.
            print(f"bmt: {self.what} failed: {error}", file=sys.stderr, flush=True)


_under_way: _Save | None = None


def start_save(what: str, write: Callable[[], None]) -> None:
    """Run ``write`` on a thread. Call :func:`join_last_save` before: one save runs at a time."""
    global _under_way
    assert _under_way is None
    save = _under_way = _Save(what, write)
    if is_initialized():
        # It may communicate, and shutdown() ends the groups.
        current().at_shutdown.append(save.thread.join)
    save.thread.start()


def is_saving() -> bool:
    """Whether this rank's thread is still writing."""
    return _under_way is not None and _under_way.thread.is_alive()


def capture_result(make: Callable[[], T]) -> Callable[[], T]:
    """Call ``make`` now, and return a function that returns its result or raises its error.

    The main thread calls it for work whose result the saving thread needs. If it fails on one rank,
    the threads of all ranks learn of it later, so that no rank has to wait for the others now.
    """
    try:
        made = make()
    except Exception as error:
        failure = error

        def fail() -> NoReturn:
            raise failure

        return fail
    return lambda: made


def group_of_writers() -> Group:
    """Return a group of all ranks for the thread of :func:`start_save`, separate from the groups of
    the program.

    The first call is collective: it connects the group now, at the same point of the program on
    all ranks.
    """
    if not is_initialized():
        return world_group()
    group = current().topology.twin(world_group(), BESIDE_THE_PROGRAM)
    return group.connected() if isinstance(group, LazyGroup) else group


def wait_for_saves() -> None:
    """Wait until the last non-blocking :func:`save` is on disk. If it failed, raise its error on
    every rank. Collective.
    """
    finish_last_save("")


def finish_last_save(before: str) -> None:
    """Like :func:`wait_for_saves`. Errors name the operation that waits, ``before``, for example
    "loading model.pt".
    """
    what = (
        f"a checkpoint in the background, before {before}"
        if before
        else "a checkpoint in the background"
    )
    with off_meta_device(), collective_section(world_group(), what):
        join_last_save()


def join_last_save() -> None:
    """Wait for this rank's thread, and raise its error. Communicates nothing: call it in a
    collective section.
    """
    global _under_way
    if (finished := _under_way) is None:
        return
    finished.thread.join()
    _under_way = None  # only now: if the wait is interrupted, the next save must wait again
    if is_initialized() and finished.thread.join in current().at_shutdown:
        current().at_shutdown.remove(finished.thread.join)
    if (error := finished.error) is not None:
        is_ours = isinstance(error, BmtError)
        cause = str(error) if is_ours else f"{type(error).__name__}: {error}"
        kind = type(error) if is_ours else CheckpointError
        raise kind(f"In the background, {finished.what} failed: {cause}") from error
