"""``make_lazy``: makes modules look up a name when it is first used, in the table or among the
files of this package.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bmtrain._table import (
    FILE_MODULES,
    INTERNALS,
    OLD_PATHS,
    TABLE,
    Home,
    children,
    submodules,
)

MODULES = {**TABLE, **OLD_PATHS}


def make_lazy(module: ModuleType) -> None:
    """Give ``module`` the names and submodules that the table lists for it."""
    # Most modules of BMTrain have names of the table only, so they need no files. They are put in
    # sys.modules now, because the import statement would otherwise replace the function
    # `bmtrain.synchronize` by the module of that name.
    for name in children(module.__name__):
        full_name = f"{module.__name__}.{name}"
        if full_name in FILE_MODULES:
            continue
        child = ModuleType(full_name, f"Names for ``{full_name}``: see ``bmtrain/_table.py``.")
        child.__spec__ = ModuleSpec(full_name, None, is_package=True)
        child.__path__ = []
        child.__package__ = full_name
        sys.modules[full_name] = child
        make_lazy(child)
        if name not in MODULES[module.__name__]:
            setattr(module, name, child)
    namespace = vars(module)
    namespace["__getattr__"] = partial(_look_up, module)
    namespace["__dir__"] = partial(_list_names, module)


class InternalsFinder:
    """Last in ``sys.meta_path``: an import of BMTrain's internals raises an error that says what
    they are.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError if ``name`` is a module of :data:`INTERNALS`, or below a module
        of :data:`OLD_PATHS`.
        """
        if _is_internal(*name.rpartition(".")[::2]):
            raise ImportError(_about_internal(name), name=name)


def _is_internal(module: str, name: str) -> bool:
    return f"{module}.{name}" in INTERNALS or module in OLD_PATHS


def _about_internal(full_name: str) -> str:
    names = OLD_PATHS.get(full_name.rpartition(".")[0])
    here = f" Of this module bmt has {', '.join(names)}." if names else ""
    asked = full_name.replace("bmtrain", "bmt", 1)
    return (
        f"{asked} is an internal of BMTrain, and bmt has nothing like it.{here} See 'Old paths' in"
        " docs/migration.md."
    )


def resolve(home: Home, asked: str) -> Any:
    """Return the object at ``home``, for which the user wrote ``asked``.

    If its package is not installed, raises ModuleNotFoundError that says how to install it. An
    ImportError inside an installed package is raised unchanged.
    """
    if importlib.util.find_spec(home.package) is None:
        raise ModuleNotFoundError(_missing(home, asked), name=home.package)
    value = getattr(importlib.import_module(home.module), home.attribute)
    if "bmt_core" in sys.modules:  # this name's package has imported it
        importlib.import_module("bmtrain._old_names").add_old_names()
    return value


def _missing(home: Home, asked: str) -> str:
    from bmt_core.packages import PACKAGES  # here: it brings torch

    return (
        f"{asked} is provided by {home.distribution}, which is not installed. Install it"
        f" with: {PACKAGES[home.distribution].install}"
    )


def _look_up(module: ModuleType, name: str) -> Any:
    names = MODULES[module.__name__]
    asked = f"bmt{module.__name__.removeprefix('bmtrain')}.{name}"
    if (full_name := f"{module.__name__}.{name}") in FILE_MODULES:
        return importlib.import_module(full_name)
    if name not in names and _is_internal(module.__name__, name) and not name.startswith("__"):
        raise AttributeError(_about_internal(full_name), name=name, obj=module)
    if name not in names:
        known = [*names, *submodules(module.__name__)]
        # All that begin so: of Adam, AdamOptimizer and AdamW, which differ in weight decay, the
        # nearest is but one.
        close = sorted(
            each for each in known if each.startswith(name)
        ) or difflib.get_close_matches(name, known, n=1)
        hint = (
            f" Did you mean {', '.join(map(repr, close[:4]))}?"
            if close and not name.startswith("__")
            else ""
        )
        # Without ``obj``, with which Python would add a hint of its own to the traceback.
        raise AttributeError(f"{asked} does not exist.{hint}", name=name)
    value = resolve(names[name], asked)
    setattr(module, name, value)
    return value


def _list_names(module: ModuleType) -> list[str]:
    """List the names whose packages are installed, so that tools can read every listed name."""
    names = {
        name
        for name, home in MODULES[module.__name__].items()
        if importlib.util.find_spec(home.package) is not None
    }
    special = {name for name in vars(module) if name.startswith("__")} - {"__getattr__", "__dir__"}
    return sorted({*special, *names, *submodules(module.__name__)})
