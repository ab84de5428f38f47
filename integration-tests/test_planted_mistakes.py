"""A mistake that is planted into ranks is found by a hundred drawn examples at most, and named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from planted_mistakes import MISTAKES, MOST, Gpt, Mistake, examples_needed, no_mistake, tokens_of

from bmt_testing import TrainingSettings, assert_matches_single, training_settings


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.plant.__name__ for mistake in MISTAKES])
def test_a_planted_mistake_is_found_and_named(mistake: Mistake) -> None:
    needed, message = examples_needed(mistake)
    print(f"{mistake.plant.__name__}: {needed} examples")
    assert needed <= MOST
    for phrase in (*mistake.phrases, "TrainingSettings(", f"={mistake.plant.__name__}"):
        assert phrase in message, message


@given(drawn=training_settings(axes={"pp": (1, 2)}))
@settings(deadline=None, max_examples=5, derandomize=True, database=None)
def test_nothing_is_found_where_no_mistake_is_planted(drawn: TrainingSettings) -> None:
    assert_matches_single(
        Gpt,
        tokens_of,
        steps=2,
        settings=drawn,
        reference="parts",
        parallelize=no_mistake,
        pipeline="layers",
    )


def test_the_table_in_the_documents_has_every_mistake() -> None:
    page = Path(__file__).parents[1] / "tools" / "mutation_scores.md"
    section = page.read_text().split("## Planted into bmt")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \| ", section, re.MULTILINE)
    assert [name for name, _ in rows] == [mistake.name for mistake in MISTAKES]
    assert all(int(needed) <= MOST for _, needed in rows)
