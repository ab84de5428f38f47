"""docs/benchmarks.md and its pictures have what docs/results has, and nothing is left out."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from html import escape
from pathlib import Path

import pytest

from benchmark_page import (
    IMAGES,
    PAGE,
    PICTURES,
    RESULTS,
    TABLES,
    Ratio,
    Record,
    Table,
    by_operation,
    by_setting,
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


def test_the_page_has_the_tables_of_the_records() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "Run tools/benchmark_page.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_what_the_records_have(name: str, tmp_path: Path) -> None:
    """Its texts are compared: other releases of matplotlib may draw them elsewhere."""
    PICTURES[name].draw(tmp_path / name)
    drawn, kept = (texts_of(folder / name) for folder in (tmp_path, IMAGES))
    assert drawn == kept, "Run tools/benchmark_page.py"
    assert escape(PICTURES[name].title) in drawn and len(drawn) > 8
    assert f"images/{name})" in PAGE.read_text()


def test_every_file_of_records_is_a_table() -> None:
    assert {path.stem for path in RESULTS.glob("*.jsonl")} == TABLES.keys()


def texts_of(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text())


@pytest.mark.parametrize("name", TABLES)
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
        for record in records(name):
            if table.layout(record)[0] not in table.leaves_out:
                row = next(
                    line for line in lines if line.startswith(f"| {table.layout(record)[0]} |")
                )
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


def test_an_operation_has_the_figures_of_both_in_a_cell() -> None:
    found = [
        replace(RECORD, setting="all_gather, 2 GPUs, 1 KiB", value="16"),
        replace(RECORD, setting="all_gather, 2 GPUs, 1 KiB", toolkit="torch", value="33"),
    ]
    table = Table(corner="µs", parts=("bmt", "torch"), layout=by_operation)
    assert table_lines(table, found)[:3] == [
        "| µs | 2 GPUs, 1 KiB |",
        "| --- | --- |",
        "| all_gather | 16 (33) |",
    ]


def test_the_source_of_a_table_names_every_command() -> None:
    other = replace(RECORD, command="tools/bench state")
    gone = replace(RECORD, command="tools/bench no-more")
    assert source_lines([RECORD, RECORD, other, gone]) == [
        "1 × NVIDIA H200, 2026-11-26, torch 2.11.0, commit a80edf2:",
        "",
        "```sh",
        "tools/bench measure",
        "tools/bench state",
        "```",
        "",
        "With what the tree had at that commit:",
        "",
        "```text",
        "tools/bench no-more",
        "```",
    ]


def test_a_page_without_the_place_of_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="once, not 0 times"):
        with_tables(PAGE.read_text().replace("<!-- end of muon -->", ""))
