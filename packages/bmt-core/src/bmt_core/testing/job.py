"""What travels from the pool to a worker: which function to call, with what, in which environment."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call on one rank. ``arguments`` are pickled apart, because they may need the function's module imported first."""

    rank: int
    function: FunctionReference
    arguments: bytes
    env: Mapping[str, str]
    init: Mapping[str, Any] | None

    def load_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unpickle the positional and the keyword arguments."""
        args, kwargs = pickle.loads(self.arguments)
        return args, kwargs


@dataclass(frozen=True)
class FunctionReference:
    """A module-level function, found again in another process by its module's name or else by its file.

    Test modules are often not importable by name (pytest's import mode ``importlib`` invents names), hence the file.
    """

    module: str
    file: str | None
    name: str

    @classmethod
    def to(cls, function: Callable[..., Any]) -> FunctionReference:
        """Refer to ``function``; ValueError for lambdas, closures and methods."""
        reference = cls(function.__module__, None, getattr(function, "__qualname__", repr(function)))
        module = sys.modules[reference.module]
        if getattr(module, reference.name, None) is not function:
            raise ValueError(
                f"{reference.module}.{reference.name} cannot run on ranks: it must be a function at the top level of its "
                "module, because every rank imports it by name. Pass what a closure would hold as arguments."
            )
        return cls(reference.module, getattr(module, "__file__", None), reference.name)

    def resolve(self) -> Callable[..., Any]:
        """Import the module, if need be, and return the function."""
        function: Callable[..., Any] = getattr(self._import(), self.name)
        return function

    def _import(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None and _same_file(known, self.file):
            return known
        spec = None if self.file is None else importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None or _is_importable(self.module, self.file):
            return importlib.import_module(self.module)
        # Unpickling something of a module "a.b" imports "a" too.
        for parent in accumulate(self.module.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(parent, ModuleType(parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def _is_importable(name: str, file: str | None) -> bool:
    """Whether a plain ``import name`` would load ``file``."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and file is not None and Path(spec.origin) == Path(file)


def _same_file(module: ModuleType, file: str | None) -> bool:
    # A spawned process knows its parent's main program as "__main__" under another loader, with the same file.
    return file is None or getattr(module, "__file__", None) == file
