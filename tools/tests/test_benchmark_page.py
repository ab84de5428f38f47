"""The tables of docs/benchmarks.md and docs/recipes.md have what docs/results has, and can be
measured again.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmark_page import (
    BENCHMARKS,
    RECIPES,
    RESULTS,
    TABLES,
    Ratio,
    Record,
    Table,
    by_setting,
    is_gone,
    is_shown,
    records,
    source_lines,
    table_lines,
    with_tables,
)

RECORD = Record(
    date="2026-11-26",
    device="1 × NVIDIA H200",
    torch="2.11.0",
    commit="a80edf2",
    command="tools/bench measure",
    toolkit="bmt",
    setting="batch 1",
    quantity="speed",
    value="1.50",
    unit="s",
)


@pytest.mark.parametrize("page", [BENCHMARKS, RECIPES], ids=lambda page: page.stem)
def test_a_page_has_the_tables_of_the_records(page: Path) -> None:
    assert with_tables(page) == page.read_text(), "Run tools/benchmark_page.py"


def test_every_table_can_be_measured_again() -> None:
    gone = {
        record.command for name in TABLES for record in records(name) if is_gone(record.command)
    }
    assert gone == set(), "The records stay, their table leaves the page."


def test_the_page_says_what_the_records_of_faults_say() -> None:
    found = records("faults")
    of_calls = "that of its last or next call"
    kinds = ("trainings", "not named", "right layer", of_calls, "wrong layer", "no layer")
    counts = [
        sum(int(record.value) for record in found if record.toolkit == kind) for kind in kinds
    ]
    assert counts == [237, 0, 231, 5, 1, 0]
    text = BENCHMARKS.read_text()
    assert "In 237 random trainings" in text and "All errors named that rank." in text
    assert f"231 named the right layer too, 5 {of_calls}, and 1 a wrong one" in text


@pytest.mark.parametrize("name", [path.stem for path in RESULTS.glob("*.jsonl")])
def test_a_record_says_when_on_what_and_how_it_was_measured(name: str) -> None:
    for record in records(name):
        for field in fields(record):
            assert getattr(record, field.name) or field.name == "rounds", (record, field.name)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date)
        assert re.fullmatch(r"[0-9a-f]{7}|not recorded", record.commit)
        if record.unit != "text":
            assert re.fullmatch(r"\d+(\.\d+)?(–\d+(\.\d+)?)?", record.value)


def test_every_value_of_a_record_stands_in_its_table() -> None:
    for name, table in TABLES.items():
        lines = table_lines(table, records(name))
        shown = [record for record in records(name) if is_shown(table, record)]
        assert len(shown) > 5
        for record in shown:
            if table.layout(record)[2] in table.parts:
                of_line = table.layout(record)[1 if table.is_turned else 0]
                row = next(line for line in lines if line.startswith(f"| {of_line} |"))
                assert re.search(rf"[ (]{re.escape(record.value)}[ ,)]", row), record


def test_rows_columns_and_digits_are_those_of_the_records() -> None:
    found = [
        replace(RECORD, toolkit="peer", value="1.20"),
        RECORD,
        replace(RECORD, quantity="peak", value="10"),
        replace(RECORD, setting="batch 2", value="2"),
    ]
    ratio = Ratio(name="to it", above=("bmt",), below=("peer",))
    table = Table(corner="s (GiB)", parts=("speed", "peak"), ratios=(ratio,))
    assert table_lines(table, found)[:5] == [
        "| s (GiB) | batch 1 | batch 2 |",
        "| --- | --- | --- |",
        "| peer | 1.20 |  |",
        "| bmt | 1.50 (10) | 2 |",
        "| to it | **1.25** |  |",
    ]
    text = replace(RECORD, setting="said", value="some words", unit="text")
    ratio = replace(ratio, columns=("batch 1",))
    table = Table(corner="s", parts=("speed",), ratios=(ratio,))
    assert table_lines(table, [*found[:2], text])[3:5] == [
        "| bmt | 1.50 | some words |",
        "| to it | **1.25** |  |",
    ]
    turned = Table(corner="s", parts=("speed",), layout=by_setting)
    assert table_lines(turned, found[:2])[2:3] == ["| batch 1 | 1.20 | 1.50 |"]


def test_a_ratio_of_times_divides_the_time_of_the_peer() -> None:
    ratio = Ratio(name="", above=("a", "b"), below=("c",), is_time=True)
    assert ratio.of({"a": 2.0, "b": 1.0, "c": 4.0}) == "**4.00**"
    assert ratio.of({"a": 2.0}) == ""


def test_a_table_has_the_rows_and_columns_that_are_asked_for() -> None:
    found = [
        RECORD,
        replace(RECORD, toolkit="peer", value="1.20"),
        replace(RECORD, setting="batch 2", value="2", command="tools/bench state"),
    ]
    table = Table(corner="s", parts=("speed",), rows=("bmt",), columns=("batch 2",))
    assert table_lines(table, found) == [
        *("| s | batch 2 |", "| --- | --- |", "| bmt | 2 |", ""),
        *source_lines(found[2:]),
    ]


def test_a_table_may_be_turned() -> None:
    found = [RECORD, replace(RECORD, setting="batch 2", value="2")]
    table = Table(corner="s", parts=("speed",), is_turned=True)
    assert table_lines(table, found)[:4] == [
        *("| s | bmt |", "| --- | --- |", "| batch 1 | 1.50 |", "| batch 2 | 2 |"),
    ]


def test_the_source_of_a_table_has_the_command_of_its_first_record() -> None:
    other = replace(RECORD, command="tools/bench state")
    assert source_lines([RECORD, RECORD, other]) == [
        "1 × NVIDIA H200, 2026-11-26, torch 2.11.0, commit a80edf2:",
        "",
        "```sh",
        "tools/bench measure",
        "```",
    ]


def test_commands_that_the_tree_has_no_more_are_known() -> None:
    assert not is_gone("tools/bench measure") and is_gone("tools/bench no-more")
    assert is_gone("python integration-tests/no_more.py")


def test_a_page_without_the_place_of_a_table_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(BENCHMARKS.read_text().replace("<!-- end of offload -->", ""))
    monkeypatch.setitem(TABLES, "offload", replace(TABLES["offload"], page=page))
    with pytest.raises(ValueError, match="once, not 0 times"):
        with_tables(page)
