"""``repeat_lines``: the line of code, and the command, that repeat one comparison."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any


def repeat_lines(
    functions: Mapping[str, Callable[..., Any] | None], options: Mapping[str, Any]
) -> str:
    """Return lines that say how to repeat the comparison: the settings, a call in Python, and a
    command for a shell.

    ``functions`` and ``options`` are the arguments of :func:`assert_matches_single`, by name.
    """
    given = {name: function for name, function in functions.items() if function is not None}
    positional = [_expression(given.pop(name)) for name in ("model_fn", "batch_fn")]
    named = {name: _expression(value) for name, value in (*options.items(), *given.items())}
    arguments = [*positional, *(f"{name}={value}" for name, value in named.items())]
    call = f"assert_matches_single({', '.join(arguments)})"
    call = call.replace("'", '"') if '"' not in call else call  # a shell's quotes are single ones
    lines = [f"settings: {options['settings']!r}", f"repeat in Python:  {call}"]
    if (command := _command([*filter(None, functions.values())], call)) is not None:
        lines.append(f"repeat in a shell: {command}")
    return "\n".join(lines)


def _command(functions: Sequence[Callable[..., Any]], call: str) -> str | None:
    """Return a command that runs ``call``; None if a function is in no file."""
    folders: dict[str, None] = {}
    imports: dict[str, list[str]] = {"bmt_testing": ["TrainingSettings", "assert_matches_single"]}
    for function in functions:
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


def _expression(value: Any) -> str:
    if isinstance(value, partial):
        return f"partial({', '.join([_expression(value.func), *map(repr, value.args)])})"
    return value.__name__ if callable(value) else repr(value)


def _import_path(file: Path) -> tuple[Path, str]:
    """Return a folder, and the name by which ``file`` is imported from there. Pytest gives test
    files other names.
    """
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)
