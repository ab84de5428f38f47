"""``UncaughtErrors``: what a rank prints of the error that ends its program, and what torchrun
shows of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from bmt_core.errors import BmtError, CallError, RemoteError
from bmt_core.run.rendezvous import launcher_serves_store
from bmt_core.threads import start_thread_that_may_stay
from bmt_core.user_warnings import is_of_library

VARIABLE = "BMT_TRACEBACK"
_PATIENCE = 2.0  # seconds for which a rank waits for the store, whose host may have vanished
_SHOWN = "uncaught/shown"  # in the store when some rank has printed the calls of its error

ResultT = TypeVar("ResultT")
Calls = list[traceback.FrameSummary]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class UncaughtErrors:
    """The ``sys.excepthook`` between ``init_distributed()`` and ``shutdown()``.

    An error is printed without the calls inside of bmt and torch. If it ends several ranks in the
    same lines of the program, the first prints these lines, and every other rank one line. So does
    a rank that ends only because another has failed. With ``BMT_TRACEBACK=full`` every rank prints
    all calls. The same text goes to torchrun's error file: the last that torchrun prints is the
    earliest of these files. A hook that the program has set before the run prints in place
    of this one.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.store: dist.Store | None = None
        """Through which the ranks learn what others print; None: each prints everything."""
        self.has_run_failed: Callable[[], bool] = lambda: False
        self._rank = rank
        self._prefix = f"[rank{rank}]: " if world_size > 1 else ""
        self._process: int | None = os.getpid()  # None after the run
        before = sys.excepthook
        self._before: Hook = before._before if isinstance(before, UncaughtErrors) else before
        sys.excepthook = self

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Be the hook after the ``with`` statement, too: inside, torch sets its own, which would
        print the prefix again.
        """
        try:
            yield
        finally:
            sys.excepthook = self

    def remove(self) -> None:
        """Put the hook back that was there before."""
        self._process = None
        if sys.excepthook is self:  # and not one that the program has set meanwhile
            sys.excepthook = self._before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # At a prompt the program goes on, and a forked child is not the rank.
        if hasattr(sys, "ps1") or sys.flags.interactive or os.getpid() != self._process:
            self._before(kind, error, trace)
            return
        shown = traceback.TracebackException(kind, error, trace, compact=True)
        calls: Calls = [] if os.environ.get(VARIABLE) == "full" else _of_program(shown, error)
        is_shown_by_other = bool(calls) and self._is_shown_by_other(error, calls)
        text = _in_one_line(error, calls[-1]) if is_shown_by_other else _shortened(shown, calls)
        _write_error_file(error, text, is_first=not is_shown_by_other)
        if getattr(self._before, "__module__", "").partition(".")[0] in ("sys", "torch"):
            lines = [self._prefix + line for line in text.splitlines(keepends=True)]
            sys.stderr.write("".join(lines))  # at once, so that those of several ranks do not mix
            sys.stderr.flush()
        else:
            self._before(kind, error, trace)
        if not is_shown_by_other:
            self._asked(lambda store: store.set(_SHOWN, ""))

    def _is_shown_by_other(self, error: BaseException, calls: Calls) -> bool:
        """Return whether another rank prints the calls that led to ``error``, when it has
        done so.
        """
        is_of_other = isinstance(error, RemoteError) and (
            not isinstance(error, CallError) or is_failure_of_rank(str(error))
        )
        places = repr((type(error), [(call.filename, call.lineno) for call in calls]))
        key = f"uncaught/{hashlib.blake2b(places.encode(), digest_size=8).hexdigest()}"

        def is_first(store: dist.Store) -> bool:
            return store.compare_set(key, "", str(self._rank)).decode() == str(self._rank)

        def ask(store: dist.Store) -> bool:
            if not is_of_other and is_first(store):
                return False
            end = time.monotonic() + _PATIENCE / 2
            while not store.check([_SHOWN]):  # torch would warn of a wait in vain
                if time.monotonic() > end:
                    return not is_first(store)
                time.sleep(0.02)
            return True

        answer = self._asked(ask)
        return is_of_other and self.store is not None if answer is None else answer

    def _asked(self, ask: Callable[[dist.Store], ResultT]) -> ResultT | None:
        """Return what ``ask`` finds in the store; None if it cannot be asked."""
        store, answers = self.store, list[ResultT]()
        # If another rank serves the store, it may end as soon as all know that the run has failed.
        is_of_other = self._rank != 0 and not launcher_serves_store()
        if store is None or (is_of_other and self.has_run_failed()):
            return None

        def run() -> None:
            with suppress(RuntimeError):  # it is gone
                answers.append(ask(store))

        start_thread_that_may_stay(run, name="bmt-uncaught-errors").join(_PATIENCE)
        return answers[0] if answers else None


def is_failure_of_rank(failure: str) -> bool:
    """Whether ``failure`` is of a rank that an error has ended, and not of calls that do not fit.

    >>> is_failure_of_rank("Rank 1 on host0 has failed (ValueError: x), in the forward of a.")
    True
    >>> is_failure_of_rank("Rank 1 has ended after 3 steps, and rank 0 waits for it in call 9.")
    False
    """
    return re.match(r"Rank \d+( on \S+)? has (failed|ended) \(", failure) is not None


def _of_program(shown: traceback.TracebackException, error: BaseException) -> Calls:
    """Return the calls outside of bmt and torch that led to ``error``. Of the errors that it
    follows, leave only these calls in ``shown``, and none of the errors that have no such call,
    except those that were never raised and that an error of the program names as its cause.
    """
    frames = traceback.walk_tb(error.__traceback__)
    calls = [
        call
        for call, (frame, _) in zip(shown.stack, frames, strict=False)
        if not is_of_library(frame)
    ]
    for name in ("__cause__", "__context__"):
        earlier, its_error = getattr(shown, name), getattr(error, name)
        if earlier is not None:
            left = _of_program(earlier, its_error)
            earlier.stack[:] = left
            is_named = its_error.__traceback__ is None and not isinstance(error, BmtError)
            setattr(shown, name, earlier if left or is_named else None)
    return calls


def _shortened(shown: traceback.TracebackException, calls: Calls) -> str:
    """Return the traceback with no other ``calls`` than these; with all if there are none."""
    if not calls or len(calls) == len(shown.stack):
        return "".join(shown.format())
    left_out, last = len(shown.stack) - len(calls), shown.stack[-1]
    place = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    innermost = f", {place} the last" if last is not calls[-1] else ""
    for call in calls[:-1]:
        call.colno = None  # the innermost call alone gets the line of ^^^
    note = (
        f"  ({left_out} calls of bmt and torch are left out{innermost}; {VARIABLE}=full shows"
        " them)\n"
    )
    shown.stack[:] = calls
    lines, end = list(shown.format()), len(list(shown.format_exception_only()))
    return "".join([*lines[:-end], note, *lines[-end:]])


def _in_one_line(error: BaseException, call: traceback.FrameSummary) -> str:
    message = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
    return f"{call.filename}:{call.lineno}: {message}\n"


def _write_error_file(error: BaseException, text: str, *, is_first: bool) -> None:
    """Let torchrun show ``text``. It counts whole seconds, and shows one of the earliest errors of
    its ranks as the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        seconds = str(int(time.time()) + (not is_first))
        extra = {"py_callstack": text.rstrip("\n"), "timestamp": seconds}
        content = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        with open(path, "w") as file:
            json.dump({"message": content}, file)
