"""``Counting``: which collectives a test's code makes."""

from __future__ import annotations

from typing import Any

import pytest

from bmt_core.comm import Group, LazyGroup


class Counting:
    """Counts the collectives of all groups while it is entered."""

    def __enter__(self) -> list[str]:
        calls: list[str] = []
        self._patch = pytest.MonkeyPatch()
        for kind in _subclasses(Group):
            if issubclass(kind, LazyGroup):  # which passes calls on
                continue
            for name in ("all_gather", "all_reduce", "reduce_scatter", "broadcast"):
                if name in vars(kind):
                    self._patch.setattr(kind, name, _counted(getattr(kind, name), calls))
        return calls

    def __exit__(self, *args: Any) -> None:
        self._patch.undo()


def _subclasses(kind: type) -> list[type]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]


def _counted(method: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(method.__name__)
        return method(*args, **kwargs)

    return counted
