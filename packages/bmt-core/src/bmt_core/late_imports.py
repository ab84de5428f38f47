"""``when_imported``: change a module that may be imported later, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Change = Callable[[ModuleType], Callable[[], None]]
"""Changes the module that it is called with, and returns what undoes that."""


def when_imported(name: str, change: Change) -> Callable[[], None]:
    """Call ``change`` with the module ``name``, now or when somebody imports it; return what undoes what ``change`` did."""
    if name in sys.modules:
        return change(sys.modules[name])
    finder = _WhenImported(name, change)
    sys.meta_path.insert(0, finder)
    return finder.undo


class _WhenImported(MetaPathFinder):
    """Finds one module, as Python does, and calls a function with it once it has been executed."""

    def __init__(self, name: str, change: Change) -> None:
        self._name = name
        self._change = change
        self._undo_change: Callable[[], None] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that calls the function; None for every other module."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self._undo_change = self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        """Leave imports alone from now on, and undo what the function did."""
        sys.meta_path.remove(self)
        if self._undo_change is not None:
            self._undo_change()
