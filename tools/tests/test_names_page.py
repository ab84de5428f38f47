"""The page of names is that of the code, and every name has a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bmt_checkpoint
import bmt_core
import bmt_params
from names_page import (
    OLD_PATHS_TEST,
    PAGE,
    ROOT,
    Name,
    chosen_test,
    listed_tests,
    page,
    public_names,
)
from tests_read import Uses, _read_file, read_uses


@pytest.fixture(scope="module")
def uses() -> Uses:
    return read_uses(ROOT)


def test_the_page_has_every_name_and_a_test_that_uses_it(uses: Uses) -> None:
    names, tests = public_names(), listed_tests(PAGE.read_text())
    run_the_tool = (
        "Run `.venv/bin/python tools/names_page.py`, and write a test where it finds none."
    )
    assert [name.title for name in names if chosen_test(name, uses, None) is None] == [], (
        "names without a test"
    )
    wrong = [
        name.title
        for name in names
        if tests.get(name.title) != chosen_test(name, uses, tests.get(name.title))
    ]
    assert wrong == [], f"The page names no test that uses these. {run_the_tool}"
    assert page(names, tests) == PAGE.read_text(), (
        f"docs/names.md is not what the code says. {run_the_tool}"
    )
    file, _, function = OLD_PATHS_TEST.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


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
    assert chosen_test(Name(("bmt.sum_loss",), bmt_core.sum_loss), found, test) is None
