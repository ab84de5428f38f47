#!/usr/bin/env python3
"""Write the tables of ``docs/benchmarks.md`` and ``docs/recipes.md`` from recorded measurements.

``python3 tools/benchmark_page.py`` reads ``docs/results/*.jsonl``: a line for each measurement. A
new measurement replaces the lines of its file. A file is a table of a page as long as its commands
can be run; after that its records are kept as data. A test compares pages and records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.__main__ import COMMANDS

DOCS = Path(__file__).resolve().parent.parent / "docs"
BENCHMARKS = DOCS / "benchmarks.md"
RECIPES = DOCS / "recipes.md"
RESULTS = DOCS / "results"
# Of pictures.
IMAGES = DOCS / "images"
PEER_COLORS = ("#f58518", "#e8a860")
OUR_COLORS = ("#4c78a8", "#9ecae9")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement. ``value`` has the digits that were recorded, or is a range of them, or, if
    the unit is "text", what was printed.
    """

    date: str
    device: str
    torch: str
    commit: str
    command: str
    toolkit: str
    setting: str
    quantity: str
    value: str
    unit: str
    rounds: str = ""
    """All rounds, if they were recorded, of which ``value`` is the median."""


def records(name: str) -> list[Record]:
    """Return the measurements in ``docs/results/<name>.jsonl``."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    # Numbers stay as they are written: 1.50 says more than 1.5.
    return [Record(**json.loads(line, parse_float=str, parse_int=str)) for line in lines]


Cell = tuple[str, str, str]
"""Row, column, and which of the values in a cell."""


def by_toolkit(record: Record) -> Cell:
    """A row for each toolkit, a column for each setting."""
    return record.toolkit, record.setting, record.quantity


def by_setting(record: Record) -> Cell:
    """A row for each setting, a column for each toolkit."""
    return record.setting, record.toolkit, record.quantity


def by_column(record: Record) -> Cell:
    """A row for each setting, a column for each toolkit, which here is what was measured."""
    return record.setting, record.toolkit, ""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A row of quotients, column by column: the best of ``above`` to the best of ``below``."""

    name: str
    above: Sequence[str]
    below: Sequence[str]
    is_time: bool = False
    """Whether less is better: then it is the time of ``below`` that is divided."""
    columns: Sequence[str] = ()
    """Those that have the quotient; empty: all."""

    def of(self, values: dict[str, float]) -> str:
        """Return the quotient for the ``values`` of the rows in a column."""
        best = min if self.is_time else max
        above, below = (
            best((values[row] for row in rows if row in values), default=None)
            for rows in (self.above, self.below)
        )
        if above is None or below is None:
            return ""
        return f"**{below / above if self.is_time else above / below:.2f}**"


@dataclass(frozen=True, kw_only=True)
class Table:
    """How the measurements of a file become a table. A cell has the first value, and those of the
    other ``parts`` in parentheses.
    """

    corner: str
    parts: Sequence[str]
    layout: Callable[[Record], Cell] = by_toolkit
    ratios: Sequence[Ratio] = ()
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    """Those that the page shows; empty: all."""
    is_turned: bool = False
    """Whether the page has a line for each column: tables with many columns do not fit."""
    page: Path = BENCHMARKS


SPEED = "tokens/s per GPU (peak GiB)"
SPEED_AND_MFU = "tokens/s per GPU (peak GiB, MFU %)"
TO_FSDP2 = Ratio(name="bmt to FSDP2", above=("bmt",), below=("FSDP2",))
TORCH_STAGES = ("torch, 1F1B", "torch, zero bubble V")
OUR_STAGES = ("bmt, 1F1B", "bmt, zero bubble V")
HOST = "FSDP2, states and parameters on the host"
DCP = "torch.distributed.checkpoint, FSDP2"

TABLES = {
    "real-models": Table(
        corner=SPEED_AND_MFU,
        parts=("speed", "peak", "MFU"),
        ratios=(TO_FSDP2,),
        is_turned=True,
    ),
    "recipes": Table(corner=SPEED_AND_MFU, parts=("speed", "peak", "MFU"), page=RECIPES),
    "long-sequences": Table(
        corner=SPEED, parts=("speed", "peak"), ratios=(TO_FSDP2,), is_turned=True
    ),
    "fsdp2-four-h200": Table(
        corner=SPEED,
        parts=("speed", "peak"),
        ratios=(TO_FSDP2,),
        columns=(*("batch 1", "batch 8", "batch 32", "batch 1, level 2", "batch 8, hybrid 2 × 2"),),
    ),
    "pipelines-four-h200": Table(
        corner=SPEED,
        parts=("speed", "peak"),
        ratios=(
            Ratio(
                name="the best of bmt to the best of torch", above=OUR_STAGES, below=TORCH_STAGES
            ),
        ),
    ),
    "tensor-parallel-training": Table(
        corner=SPEED,
        parts=("speed", "peak"),
        ratios=(Ratio(name="bmt-tp to DTensor", above=("bmt-tp",), below=("DTensor",)),),
    ),
    "offload": Table(
        corner="Adam's states on the device: s per step (peak GiB)",
        parts=("time", "peak"),
        rows=("bmt, none", HOST, "bmt, all: AdamOptimizer", "FSDP2, all on the device"),
        ratios=(
            Ratio(
                name="bmt, none, to FSDP2 on the host",
                above=("bmt, none",),
                below=(HOST,),
                is_time=True,
            ),
        ),
    ),
    "checkpoints-quiet": Table(
        corner="s",
        parts=("median",),
        ratios=(Ratio(name="bmt to DCP", above=("bmt, a directory",), below=(DCP,), is_time=True),),
    ),
}
"""The tables of the pages. Other files of records are kept as data."""


def table_lines(table: Table, found: Sequence[Record]) -> list[str]:
    """Return the lines of a table, and below it where its values come from."""
    found = [record for record in found if is_shown(table, record)]
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in found:
        row, column, part = table.layout(record)
        cells.setdefault((row, column), {})[part] = record
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [[table.corner, *columns]]
    for row in dict.fromkeys(row for row, _ in cells):
        lines.append(
            [row, *(cell_text(cells.get((row, column)), table.parts) for column in columns)]
        )
    for ratio in table.ratios:
        values = [
            {
                row: float(parts[table.parts[0]].value)
                for (row, at), parts in cells.items()
                if at == column and column in (ratio.columns or columns)
            }
            for column in columns
        ]
        lines.append([ratio.name, *map(ratio.of, values)])
    if table.is_turned:
        lines = [list(line) for line in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(line)} |" for line in lines] + ["", *source_lines(found)]


def is_shown(table: Table, record: Record) -> bool:
    """Whether the table on the page has ``record``."""
    row, column, _ = table.layout(record)
    return row in (table.rows or (row,)) and column in (table.columns or (column,))


def cell_text(values: dict[str, Record] | None, parts: Sequence[str]) -> str:
    """Return the first of ``parts`` and the others in parentheses."""
    if values is None:
        return ""
    first, *others = [values[part] for part in parts if part in values]
    beside = ", ".join(
        [record.value for record in others] + ([first.rounds] if first.rounds else [])
    )
    return f"{first.value} ({beside})" if beside else first.value


def source_lines(found: Sequence[Record]) -> list[str]:
    """Return date, device, versions and commits of measurements, and the command of the first."""
    parts = []
    for field in ("device", "date", "torch", "commit"):
        values = dict.fromkeys(getattr(record, field) for record in found)
        text = " and ".join(values)
        parts.append(text if field in ("device", "date") else f"{field} {text}")
    return [f"{', '.join(parts)}:", "", "```sh", found[0].command, "```"]


def is_gone(command: str) -> bool:
    """Whether what ``command`` starts is no more in the tree."""
    bench, script = re.match(r"tools/bench (\S+)", command), re.match(r"python (\S+)", command)
    if bench is not None:
        return bench[1] not in COMMANDS
    return script is not None and not (DOCS.parent / script[1]).exists()


def with_tables(page: Path) -> str:
    """Return the text of ``page`` with its tables as the records have them now."""
    text = page.read_text()
    for name, table in TABLES.items():
        if table.page != page:
            continue
        begin, end = f"<!-- {name}: tools/benchmark_page.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        new = "\n".join([begin, "", *table_lines(table, records(name)), "", end])
        text, count = pattern.subn(new.replace("\\", r"\\"), text)
        if count != 1:
            raise ValueError(f"The page must have {begin} and {end} once, not {count} times.")
    return text


if __name__ == "__main__":
    for each in (BENCHMARKS, RECIPES):
        each.write_text(with_tables(each))
