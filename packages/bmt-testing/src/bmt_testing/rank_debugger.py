"""``pytest --pdb`` on a rank: the debugger of the first rank that fails, in the user's terminal."""

from __future__ import annotations

import bdb
import os
import pdb
from pathlib import Path

import pytest

TERMINAL = "/dev/tty"
"""A rank's standard input is not the terminal, and pytest captures its output."""

A_DAY = 86400.0
"""Seconds that the other ranks wait for who debugs."""

is_wanted = False
"""Whether pytest has the option ``--pdb``. Set by the pytest plugin."""


class FailedAndDebugged(pytest.fail.Exception, bdb.BdbQuit):  # type: ignore[name-defined,misc]
    """Fails a test. Pytest opens no debugger for :class:`bdb.BdbQuit`: one was open on the rank."""


def has_terminal() -> bool:
    """Whether this process, and so its ranks, have a terminal."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR))
    except OSError:
        return False
    return True


def debug_if_first(error: BaseException, folder: str) -> None:
    """Let the user look at ``error`` in the terminal, unless another rank was there before.
    ``folder`` is one that all ranks share, and new for every test.
    """
    try:
        Path(folder, "debugged").touch(exist_ok=False)
    except FileExistsError:
        return
    with open(TERMINAL) as keyboard, open(TERMINAL, "w") as screen:
        rank, of = os.environ["RANK"], os.environ["WORLD_SIZE"]
        kind = type(error).__name__
        screen.write(f"\n>>> rank {rank} of {of} failed: {kind}: {error}\n>>> q ends the test\n")
        debugger = pdb.Pdb(stdin=keyboard, stdout=screen, nosigint=True)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
