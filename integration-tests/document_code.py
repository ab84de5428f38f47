"""The code of documents: its blocks, and what they do when they run."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def guides() -> list[str]:
    """Return the documents that show code to users, by their paths in the repository."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md", "packages/*/*.md")
    return sorted(
        path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)
    )


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of code in ``page``, a path in the repository, that are marked with
    ``language``.
    """
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


def code(page: str, *numbers: int) -> str:
    """Return the Python blocks of ``page`` that have these numbers, from 0, as one program; without
    numbers all of them.

    A test gets what it runs by this function, with arguments that are written out, since
    ``test_every_block_of_python_is_run_by_a_test`` reads such calls.
    """
    found = blocks(page)
    return "\n".join(found[number] for number in numbers or range(len(found)))


def run(source: str, folder: str | Path | None = None, /, **names: Any) -> dict[str, Any]:
    """Run ``source`` on the CPU, in ``folder``, where it finds ``names``; return all names that
    there are afterwards.
    """
    if folder is not None:
        os.chdir(folder)
    source = source.replace("init_distributed(", "init_distributed(device='cpu', ")
    names = {"__name__": "example", **names}
    exec(compile(source, "document", "exec"), names)
    return names


def printed_by(source: str, directory: str) -> str:
    """Return what ``source`` prints, and end the run that it starts; a function for
    ``run_ranks``.
    """
    import bmtrain as bmt

    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run(source, directory)
        return printed.getvalue()
    finally:
        if bmt.is_initialized():
            bmt.shutdown()
