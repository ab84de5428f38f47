"""The code of documents: its blocks, run in order as one program, and what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of code in ``docs/page`` that are marked with ``language``."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )


def run_blocks(page: str, numbers: Iterable[int], directory: str) -> tuple[str, dict[str, Any]]:
    """Run the Python blocks of ``page`` with these ``numbers`` on the CPU, in ``directory``; return
    what they print and the names that they define.
    """
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "example"}
    printed = io.StringIO()
    code = blocks(page)
    with contextlib.redirect_stdout(printed):
        for number in numbers:
            source = code[number].replace("init_distributed(", "init_distributed(device='cpu', ")
            exec(compile(source, f"docs/{page}", "exec"), names)
    return printed.getvalue(), names


def printed_by_blocks(page: str, numbers: Iterable[int], directory: str) -> str:
    """Return what these blocks print; a function for ``run_ranks``."""
    import bmtrain as bmt

    try:
        return run_blocks(page, numbers, directory)[0]
    finally:
        if bmt.is_initialized():
            bmt.shutdown()
