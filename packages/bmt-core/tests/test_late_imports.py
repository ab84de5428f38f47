"""A module is changed when it is imported, however late, and changed back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bmt_core.late_imports import when_imported


def doubled(module: ModuleType) -> Callable[[], None]:
    changed: Any = module
    changed.value *= 2
    return lambda: setattr(module, "value", changed.value // 2)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "of_a_test.py").write_text("value = 21\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_test", raising=False)
    return "of_a_test"


@pytest.mark.parametrize("early", [True, False])
def test_a_module_is_changed_now_or_when_it_is_imported_and_changed_back(module: str, early: bool) -> None:
    finders = list(sys.meta_path)
    if early:
        importlib.import_module(module)
    undo = when_imported(module, doubled)
    imported: Any = importlib.import_module(module)
    assert imported.value == 42
    undo()
    assert imported.value == 21 and sys.meta_path == finders


def test_what_was_undone_before_the_import_changes_nothing(module: str) -> None:
    when_imported(module, doubled)()
    imported: Any = importlib.import_module(module)
    assert imported.value == 21
