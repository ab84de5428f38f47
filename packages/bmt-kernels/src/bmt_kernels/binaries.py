"""The compiled modules: loading them, and why one cannot be had."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

_DIRECTORY = Path(__file__).parent


@cache
def load(name: str) -> ModuleType | None:
    """Return the compiled module ``bmt_kernels.<name>``, None if there is none that works here."""
    return _attempt(name)[0]


@cache
def problem(name: str) -> str | None:
    """Return why :func:`load` returns None, as a clause; None if it does not."""
    return _attempt(name)[1]


@cache
def _attempt(name: str) -> tuple[ModuleType | None, str | None]:
    full_name = f"{__package__}.{name}"
    try:
        return importlib.import_module(full_name), None
    except ModuleNotFoundError as error:
        if error.name == full_name:
            others = ", ".join(sorted(path.name for path in _DIRECTORY.glob(f"{name}.*.so")))
            if others:
                return None, f"this installation of bmt-kernels has only {others}, which is for another Python"
            return None, f"this installation of bmt-kernels was built without {full_name}"
        return None, f"{full_name} cannot be loaded: {error}"
    except ImportError as error:
        return None, f"{full_name} cannot be loaded: {error}"
