"""``import_function``: find a user's function by the words of a command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bmt_core.errors import ConfigError, unknown_name


def import_module_of(text: str) -> tuple[ModuleType, str]:
    """Return the module and the name in ``MODULE:NAME``; ConfigError, in one line, if the module
    cannot be imported. The current directory is searched first, as ``python -m`` does.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{text!r} is not MODULE:FACTORY. Write for example my_model:make_model.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module), name
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"The module {module!r} cannot be imported: {message}. Start bmt verify in its folder,"
            " or name its folder in PYTHONPATH."
        ) from error


def function_in(module: ModuleType, name: str, role: str) -> Callable[..., Any]:
    """Return the function ``name`` of ``module``; ConfigError, in one line, if there is none.
    ``role`` says what it is for.
    """
    found: Callable[..., Any] | None = getattr(module, name, None)
    if callable(found):
        return found
    if found is not None:
        raise ConfigError(
            f"{module.__name__}.{name} is a {type(found).__name__}, and {role} is a function."
        )
    functions = [
        known
        for known, value in vars(module).items()
        if callable(value) and not known.startswith("_")
    ]
    unknown = unknown_name(f"function of {module.__name__}", name, functions)
    raise ConfigError(f"There is no function for {role}. {unknown}")
