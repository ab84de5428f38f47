"""``repeat_lines``: the line of code, and the command, that repeat one comparison."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bmt_testing.settings import TrainingSettings


def repeat_lines(
    functions: Sequence[Callable[..., Any] | None],
    *,
    steps: int,
    settings: TrainingSettings,
    pipeline: str | None,
    device: str,
) -> str:
    """Return lines that say how to repeat the comparison.

    ``functions`` are ``model_fn``, ``batch_fn``, ``loss_fn``, ``parallelize`` and
    ``optimizer_fn``; the last three may be None.
    """
    names = [None if function is None else _expression(function) for function in functions]
    arguments = [str(names[0]), str(names[1]), f"steps={steps}", f"settings={settings!r}"]
    for argument, value in zip(("loss_fn", "parallelize", "optimizer_fn"), names[2:], strict=True):
        if value is not None:
            arguments.append(f"{argument}={value}")
    if pipeline is not None:
        arguments.append(f"pipeline={pipeline!r}")
    if device != "cpu":
        arguments.append(f"device={device!r}")
    call = f"assert_matches_single({', '.join(arguments)})"
    call = call.replace("'", '"') if '"' not in call else call  # a shell's quotes are single ones
    lines = [f"settings: {settings!r}", f"repeat in Python:  {call}"]
    if (command := _command(functions, call)) is not None:
        lines.append(f"repeat in a shell: {command}")
    return "\n".join(lines)


def _command(functions: Sequence[Callable[..., Any] | None], call: str) -> str | None:
    """Return a command that runs ``call``; None if a function is in no file."""
    folders: dict[str, None] = {}
    imports: dict[str, list[str]] = {"bmt_testing": ["TrainingSettings", "assert_matches_single"]}
    for function in functions:
        if function is None:
            continue
        if isinstance(function, partial):
            imports["functools"] = ["partial"]
            function = function.func
        file = getattr(sys.modules[function.__module__], "__file__", None)
        if file is None:
            return None
        folder, module = _import_path(Path(file))
        folders[os.path.relpath(folder)] = None
        imports.setdefault(module, []).append(function.__name__)
    program = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    path = shlex.quote(os.pathsep.join(folders))
    return f"PYTHONPATH={path}:$PYTHONPATH python -c {shlex.quote('; '.join([*program, call]))}"


def _expression(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        return f"partial({', '.join([_expression(function.func), *map(repr, function.args)])})"
    return function.__name__


def _import_path(file: Path) -> tuple[Path, str]:
    """Return a folder, and the name by which ``file`` is imported from there. Pytest gives test
    files other names.
    """
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)
