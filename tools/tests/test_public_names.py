"""Every public name has a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bmt_checkpoint
import bmt_core
import bmt_params
from public_names import ROOT, Name, chosen_test, public_names
from tests_read import Uses, _read_file, read_uses


@pytest.fixture(scope="module")
def uses() -> Uses:
    return read_uses(ROOT)


def test_every_public_name_has_a_test_that_uses_it(uses: Uses) -> None:
    names = public_names()
    assert len(names) > 300
    assert [name.title for name in names if chosen_test(name, uses) is None] == []


HELPER = """
import bmt_core
import bmt_params
from bmt_core import comm as communication

def made():
    return bmt_params.DistributedModule()

def unused():
    return bmt_core.sum_loss
"""
TEST = """
from helper import made
from bmtrain import store

def test_uses_some():
    made().gather_all()
    store.load(1, strict=False)
"""


def test_what_a_test_uses_is_found_through_helpers_and_other_paths() -> None:
    definitions: dict[tuple[str, str], object] = {}
    helpers = {"helper": "tests/helper.py"}
    for file, text in (("tests/helper.py", HELPER), ("tests/test_some.py", TEST)):
        _read_file(file, ast.parse(text), helpers, definitions)  # type: ignore[arg-type]
    found = Uses(definitions)  # type: ignore[arg-type]
    test = "tests/test_some.py::test_uses_some"
    assert [*found.used_by] == [test] and str(Path(test).parent) == "tests"
    for value in (bmt_params.DistributedModule, bmt_checkpoint.load):
        assert found.tests_of(value) == [test]
    assert (
        found.tests_of(bmt_checkpoint.load, "strict")
        == found.tests_of(bmt_params.DistributedParameter, "gather_all")
        == [test]
    )
    assert (
        found.tests_of(bmt_core.sum_loss) == []
        and found.tests_of(bmt_checkpoint.load, "keep") == []
    )
    assert chosen_test(Name(("bmt.sum_loss",), bmt_core.sum_loss), found) is None
