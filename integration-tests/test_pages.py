"""The code of the guides runs as it stands there, and prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from document_code import blocks, printed_by_blocks

from bmt_testing import run_ranks

NUMBER = r"\d+\.\d+"


def own_lines(printed: str) -> str:
    """Return ``printed`` without the lines in which bmt describes the run."""
    return re.sub(r"^bmt: .*\n", "", printed, flags=re.MULTILINE)


def assert_prints(printed: str, expected: str) -> None:
    """Compare two texts, numbers with a point to within two units of their last digit: processors
    round differently.
    """
    printed = own_lines(printed)
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", expected)
    for found, wanted in zip(
        re.findall(NUMBER, printed), re.findall(NUMBER, expected), strict=True
    ):
        unit = 10.0 ** -len(wanted.partition(".")[2])
        assert float(found) == pytest.approx(float(wanted), abs=2 * unit)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_script_trains_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    losses, sequence = blocks("index.md", "text")
    first, *others = run_ranks(
        printed_by_blocks, ranks, "index.md", (0, 1), str(tmp_path), init=None
    )
    assert_prints(first, losses + sequence)
    assert others == [sequence] * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_holds_the_bytes_per_parameter_that_the_page_says(
    ranks: int, tmp_path: Path
) -> None:
    printed, *_ = run_ranks(printed_by_blocks, ranks, "choosing.md", (0,), str(tmp_path), init=None)
    assert own_lines(printed) == blocks("choosing.md", "text")[ranks - 1]
