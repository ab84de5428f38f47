"""Modules whose names are looked up in the table, or among the files beside it, when they are first used."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bmtrain._table import FILE_MODULES, INSTALL_HINTS, NOT_YET, TABLE, Home, submodules


def make_lazy(module: ModuleType) -> None:
    """Give ``module``, which is in the table, its names and its submodules."""
    # Old scripts import modules that are nothing but these names, so they have no files. They are in sys.modules before
    # anybody imports them: importing `bmtrain.synchronize` would otherwise bind the module over the function of that name.
    for name in submodules(module.__name__):
        full_name = f"{module.__name__}.{name}"
        if full_name in FILE_MODULES:
            continue
        child = ModuleType(full_name, f"Names for ``{full_name}``: see ``bmtrain/_table.py``.")
        child.__spec__ = ModuleSpec(full_name, None, is_package=True)
        child.__path__ = []
        child.__package__ = full_name
        sys.modules[full_name] = child
        make_lazy(child)
        if name not in TABLE[module.__name__]:
            setattr(module, name, child)
    namespace = vars(module)
    namespace["__getattr__"] = partial(_look_up, module)
    namespace["__dir__"] = partial(_list_names, module)


def resolve(home: Home, asked: str) -> Any:
    """Return what ``home`` stands for; ``asked`` is what the user wrote.

    Raises ModuleNotFoundError that names the package, and how to install it, if it is missing. An error inside a package that
    is there passes unchanged: it is not the user's installation that is wrong then.
    """
    if importlib.util.find_spec(home.package) is None:
        raise ModuleNotFoundError(_missing(home, asked), name=home.package)
    return getattr(importlib.import_module(home.module), home.attribute)


def _missing(home: Home, asked: str) -> str:
    if home.package in NOT_YET:
        return f"{asked} will be provided by {home.distribution}, a package that does not exist yet."
    install = INSTALL_HINTS[home.package]
    return f"{asked} is provided by {home.distribution}, which is not installed. Install it with: {install}"


def _look_up(module: ModuleType, name: str) -> Any:
    names = TABLE[module.__name__]
    asked = f"bmt{module.__name__.removeprefix('bmtrain')}.{name}"
    if (full_name := f"{module.__name__}.{name}") in FILE_MODULES:
        return importlib.import_module(full_name)
    if name not in names:
        close = difflib.get_close_matches(name, [*names, *submodules(module.__name__)], n=1)
        hint = f" Did you mean '{close[0]}'?" if close and not name.startswith("__") else ""
        raise AttributeError(f"{asked} does not exist.{hint}", name=name, obj=module)
    value = resolve(names[name], asked)
    setattr(module, name, value)
    return value


def _list_names(module: ModuleType) -> list[str]:
    """List what can be had here, so that tools which read every listed name do not run into missing packages."""
    names = {
        name for name, home in TABLE[module.__name__].items() if importlib.util.find_spec(home.package) is not None
    }
    special = {name for name in vars(module) if name.startswith("__")} - {"__getattr__", "__dir__"}
    return sorted({*special, *names, *submodules(module.__name__)})
