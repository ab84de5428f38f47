"""``repeat_lines``: the line of code, and the command, that repeat one comparison."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bmt_testing.job import is_importable
from bmt_testing.training_settings import TrainingSettings


def repeat_lines(
    functions: Sequence[Callable[..., Any] | None],
    *,
    steps: int,
    settings: TrainingSettings,
    pipeline: str | None,
    device: str,
) -> str:
    """Return lines that say how to repeat the comparison.

    ``functions`` are ``model_fn``, ``batch_fn``, ``loss_fn`` and ``parallelize``; the latter two may be None.
    """
    names = [None if function is None else function.__name__ for function in functions]
    arguments = [str(names[0]), str(names[1]), f"steps={steps}", f"settings={settings!r}"]
    for argument, value in zip(("loss_fn", "parallelize"), names[2:], strict=True):
        if value is not None:
            arguments.append(f"{argument}={value}")
    if pipeline is not None:
        arguments.append(f"pipeline={pipeline!r}")
    if device != "cpu":
        arguments.append(f"device={device!r}")
    call = f"assert_matches_single({', '.join(arguments)})"
    lines = [f"settings: {settings!r}", f"repeat in Python:  {call}"]
    if (command := _command(functions, call)) is not None:
        lines.append(f"repeat in a shell: {command}")
    return "\n".join(lines)


def _command(functions: Sequence[Callable[..., Any] | None], call: str) -> str | None:
    """Return a command that runs ``call``; None if a function is in a program that cannot be imported."""
    folders: dict[str, None] = {}
    imports: dict[str, None] = {}
    for function in functions:
        if function is None:
            continue
        name = function.__module__
        file = getattr(sys.modules.get(name), "__file__", None)
        if name == "__main__" or file is None:
            return None
        if not is_importable(name, file):  # a name that pytest gave it
            name = Path(file).stem
        if not is_importable(name, file) or name == Path(file).stem:
            folders[os.path.relpath(Path(file).parent)] = None
        imports[f"from {name} import {function.__name__}"] = None
    program = "; ".join(["from bmt_testing import assert_matches_single, TrainingSettings", *imports, call])
    path = f"PYTHONPATH={shlex.quote(os.pathsep.join(folders))}:$PYTHONPATH " if folders else ""
    return f"{path}python -c {shlex.quote(program)}"
