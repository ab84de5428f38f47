"""``Job``: what the pool sends to a worker process, namely a function, its arguments and
an environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call on one rank. ``arguments`` are pickled separately: they may be unpickled only after
    the function's import.
    """

    rank: int
    function: FunctionReference
    arguments: bytes
    env: Mapping[str, str]
    init: Mapping[str, Any] | None


@dataclass(frozen=True)
class FunctionReference:
    """A reference by which another process finds a module-level function: module name, module file
    and function name; and ``arguments`` that come before those of a call.

    The file is needed because pytest's import mode ``importlib`` gives test modules names that
    cannot be imported.
    """

    module: str
    file: str | None
    name: str
    arguments: tuple[Any, ...] = ()

    @classmethod
    def to(cls, function: Callable[..., Any]) -> FunctionReference:
        """Refer to ``function``, which may be a ``functools.partial`` with positional arguments;
        ValueError for lambdas, closures and methods.
        """
        if isinstance(function, partial):
            if function.keywords:
                raise ValueError(
                    f"{function} has keyword arguments: give functools.partial positional ones."
                )
            return replace(cls.to(function.func), arguments=function.args)
        reference = cls(
            function.__module__, None, getattr(function, "__qualname__", repr(function))
        )
        module = sys.modules[reference.module]
        if getattr(module, reference.name, None) is not function:
            raise ValueError(
                f"{reference.module}.{reference.name} cannot run on ranks: it must be a function at"
                " the top level of its module, because every rank imports it by name. Pass what a"
                " closure would hold as arguments."
            )
        return cls(reference.module, getattr(module, "__file__", None), reference.name)

    def resolve(self) -> Callable[..., Any]:
        """Import the module, if need be, and return the function."""
        function: Callable[..., Any] = getattr(self._import(), self.name)
        return partial(function, *self.arguments) if self.arguments else function

    def _import(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None and _same_file(known, self.file):
            return known
        spec = (
            None
            if self.file is None
            else importlib.util.spec_from_file_location(self.module, self.file)
        )
        if spec is None or spec.loader is None or _is_importable(self.module, self.file):
            return importlib.import_module(self.module)
        # Unpickling an object of the module "a.b" imports "a" too.
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
    return (
        spec is not None
        and spec.origin is not None
        and file is not None
        and Path(spec.origin) == Path(file)
    )


def _same_file(module: ModuleType, file: str | None) -> bool:
    # In a spawned process the parent's main program is called "__main__" too, and is recognised by
    # its file.
    return file is None or getattr(module, "__file__", None) == file
