"""``start_program``: runs source code in a process of its own, without the seconds that importing
torch takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from bmt_testing.workers import _context


def start_program(
    code: str,
    output: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start ``code`` as the program of a process, which is forked where ranks are: see
    :func:`bmt_testing.workers._context`. Unlike a program of ``python -c`` it ends without
    functions of ``atexit``.

    ``output``: the file to whose end it prints, errors too. ``arguments`` are its ``sys.argv[1:]``,
    ``environment`` is its whole environment, by default that of this process.
    """
    environment = dict(os.environ if environment is None else environment)
    output.touch()  # a process that is killed early does not
    process = _context().Process(
        target=_run, args=(code, str(output), list(arguments), environment)
    )
    process.start()
    return process


def run_program(
    code: str, output: Path, *, arguments: Sequence[str] = (), timeout: float = 120.0
) -> tuple[int, str]:
    """Start ``code`` as :func:`start_program` does, wait for its end, and return exit status and
    output.
    """
    return end_of(start_program(code, output, arguments=arguments), timeout), output.read_text()


def end_of(process: BaseProcess, timeout: float = 120.0) -> int:
    """Wait for ``process`` and return its exit status; after ``timeout`` seconds it is killed."""
    process.join(timeout)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(code: str, output: str, arguments: list[str], environment: dict[str, str]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
