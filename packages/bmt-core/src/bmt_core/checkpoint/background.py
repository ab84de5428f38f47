"""Saving on a thread, one save at a time. The next save or load raises its error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Protocol

from bmt_core.checkpoint.model_state import world_group
from bmt_core.comm.collective_section import collective_section
from bmt_core.params.uninitialized import off_meta_device


class FilesOfRanks(Protocol):
    """Files that several ranks write, each its own, and that become a checkpoint when all have."""

    def publish(self) -> None:
        """Make them one. Collective."""

    def discard(self) -> None:
        """Delete this rank's."""


class _Save:
    def __init__(self, what: str, write: Callable[[], None], files: FilesOfRanks | None) -> None:
        self.what = what
        self.files = files
        self.error: Exception | None = None
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


def start_save(what: str, write: Callable[[], None], files: FilesOfRanks | None = None) -> None:
    """Run ``write`` on a thread. Call :func:`wait_for_saves` before: one save runs at a time.

    ``files``, of every rank or of none, are published by the next :func:`wait_for_saves`.
    """
    global _under_way
    assert _under_way is None
    _under_way = _Save(what, write, files)
    _under_way.thread.start()


def wait_for_saves() -> None:
    """Wait until the last non-blocking :func:`save` is on disk. If it failed, raise its error on every rank. Collective."""
    global _under_way
    finished, _under_way = _under_way, None
    files = None if finished is None else finished.files
    try:
        with off_meta_device(), collective_section(world_group(), "a checkpoint in the background"):
            if finished is not None:
                finished.thread.join()
                if finished.error is not None:
                    raise finished.error
        if files is not None:
            files.publish()
    except BaseException:
        if files is not None:
            files.discard()
        raise
