"""Import paths of modules that became packages of their own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import bmt_core.testing
import bmt_testing
from bmt_core.moved_modules import moved_attribute


def test_old_path_of_the_testing_kit_is_the_same_thing_and_warns_at_the_users_line() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"bmt_core\.testing\.run_ranks is now bmt_testing\.run_ranks"
    ) as told:
        from bmt_core.testing import run_ranks
    assert run_ranks is bmt_testing.run_ranks
    assert {warning.filename for warning in told} == {__file__}


def test_unknown_name_of_an_old_path_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="run_rank'"):
        from bmt_core.testing import run_rank  # type: ignore[attr-defined]  # noqa: F401


def test_special_attributes_that_tools_ask_every_module_for_are_missing_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(bmt_core.testing, "__warningregistry__")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"of the package bmt-testing, which is not installed\. Install it with",
    ):
        moved_attribute("bmt_core.testing", "bmt_testing", "run_ranks")


def test_old_path_of_the_pytest_plugin_registers_its_marks(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "bmt_core.testing.pytest_plugin", "--markers"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "@pytest.mark.gpu(n)" in result.stdout and "@pytest.mark.ranks(n)" in result.stdout
