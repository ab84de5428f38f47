"""What a program reads and writes between ``step()`` and the next forward pass: the lists of what
waits for an update beside it (``overlap_forward``), and of what does not, are true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from parameter_reads import DOES_NOT_WAIT, WAITS, WAYS, LateHost, expected, outcomes

from bmt_testing import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "faster.md"
CODE = re.compile(r"(?:a kept )?`[^`]+`")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcomes of each rank."""
    folder = str(tmp_path_factory.mktemp("reads"))
    return run_ranks(outcomes, 2, LateHost, folder, init={"gradients": "mean"})


@pytest.mark.parametrize("name", WAYS)
def test_what_waits_and_what_does_not_is_as_the_lists_say(name: str, found: list[Any]) -> None:
    for of_rank in found:
        assert of_rank[name] == expected(name)


@pytest.mark.parametrize(("row", "names"), [("waits", WAITS), ("does not wait", DOES_NOT_WAIT)])
def test_the_page_has_the_lists(row: str, names: Iterable[str]) -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    (shown,) = [line for line in lines if line.startswith(f"| {row} |")]
    code = {text.replace("`", "") for text in CODE.findall(shown)}
    words = CODE.sub("", shown)
    assert code | {name for name in names if name in words} == set(names)
