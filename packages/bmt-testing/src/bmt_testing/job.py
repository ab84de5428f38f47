"""``Job``: what the pool sends to a worker process, namely a function, its arguments and
an environment. :func:`pickled` is how a rank gets objects.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
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
    """One call on one rank, in a run of its own or in one that several jobs share. ``arguments``
    are the function's ``(args, kwargs)`` and those of ``init_distributed``, or None. They are
    pickled separately: they may be unpickled only after the function's import.
    """

    rank: int
    function: FunctionReference
    arguments: bytes
    env: Mapping[str, str]
    is_shared: bool = False
    """Whether the run may go on with the next job: the pool says KEEP or END after the job."""
    jobs_before: int = 0
    """How many jobs its run has had."""


KEEP, END = b"keep", b"end"
"""What becomes of a shared run: it is kept for the next job, or ends."""


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
        function: Callable[..., Any] = getattr(_import(self.module, self.file), self.name)
        return partial(function, *self.arguments) if self.arguments else function


def pickled(value: object) -> bytes:
    """Pickle ``value`` for a rank. Modules in it, which Python cannot pickle, are sent by name and
    file, and the rank imports them; ValueError for one that it could not.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, ModuleType):
            return NotImplemented
        name, file = value.__name__, getattr(value, "__file__", None)
        is_typed_in = name == "__main__" and file is None
        if is_typed_in or sys.modules.get(name) is not value:
            raise ValueError(
                f"The module {name!r} cannot be sent to the ranks: they import modules by name, and"
                f" import {name} does not give this one. Put what it holds into a file that can be"
                " imported; a plugin may also be an object of a class at the top level of a module."
            )
        return _import, (name, file)


def _import(name: str, file: str | None) -> ModuleType:
    """Return the module ``name`` of ``file``, and import it if need be."""
    known = sys.modules.get(name)
    if known is not None and _same_file(known, file):
        return known
    spec = None if file is None else importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or _is_importable(name, file):
        return importlib.import_module(name)
    # Unpickling an object of the module "a.b" imports "a" too.
    for parent in accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, ModuleType(parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
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
