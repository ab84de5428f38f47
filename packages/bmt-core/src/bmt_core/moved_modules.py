"""Modules that became packages of their own: for one release their old import paths work, with
a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

from bmt_core.packages import PACKAGES


def moved_attribute(old: str, new: str, name: str) -> Any:
    """Return the attribute ``name`` of the module ``new``, which ``old`` was, and warn who asked
    for it.

    For a module-level ``__getattr__``. ModuleNotFoundError says how to install the package of
    ``new`` if it is missing.
    """
    # Asked of every module in sys.modules by tools that look for something else.
    if name.startswith("__"):
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    package = new.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        distribution = next(name for name, known in PACKAGES.items() if known.module == package)
        message = (
            f"{old} is now {new}, of the package {distribution}, which is not installed. Install"
            " it with: "
        )
        raise ModuleNotFoundError(message + PACKAGES[distribution].install, name=package)
    value = getattr(importlib.import_module(new), name)
    message = f"{old}.{name} is now {new}.{name}; the old path goes with the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return value
