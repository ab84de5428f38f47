#!/usr/bin/env python3
"""Write the tables of ``docs/benchmarks.md`` and draw its pictures, from recorded measurements.

``.venv/bin/python tools/benchmark_page.py`` reads ``docs/results/*.jsonl``: a file for each table,
a line for each measurement. A new measurement replaces the lines of its file; what was written of
an old one stays in ``docs/results/history.md``. A test compares page, pictures and records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.figure import Figure

from bench.__main__ import COMMANDS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
RESULTS = DOCS / "results"
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


def by_quantity(record: Record) -> Cell:
    """A row for each setting, a column for each toolkit and quantity."""
    return record.setting, f"{record.toolkit}, {record.unit}", ""


def by_column(record: Record) -> Cell:
    """A row for each setting, a column for each toolkit, which here is what was measured."""
    return record.setting, record.toolkit, ""


def by_operation(record: Record) -> Cell:
    """A row for what comes first in the setting, a column for the rest of it."""
    operation, _, setting = record.setting.partition(", ")
    return operation, setting, record.toolkit


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
    leaves_out: Sequence[str] = ()
    """Rows of which another table has newer values."""


SPEED = "tokens/s per GPU (peak GiB)"
TO_FSDP2 = Ratio(name="bmt to FSDP2", above=("bmt",), below=("FSDP2",))
TORCH_STAGES = ("torch, 1F1B", "torch, zero bubble V")
OUR_STAGES = ("bmt, 1F1B", "bmt, zero bubble V")
HYBRID = ("bmt shard_size=2", "bmt shard_size=2, optimizer states over all")
HSDP = "FSDP2, mesh of 2 x 2 (HSDP)"
DTENSOR = ("DTensor, compiled", "DTensor, compiled, async TP")
DCP = "torch.distributed.checkpoint, FSDP2"
FASTER_THAN_DCP = Ratio(name="bmt to DCP", above=("bmt, a directory",), below=(DCP,), is_time=True)
BESIDE_TORCH_PIPELINES = Table(
    corner=SPEED,
    parts=("speed", "peak"),
    ratios=(
        Ratio(name="the best of bmt to the best of torch", above=OUR_STAGES, below=TORCH_STAGES),
    ),
)

TABLES = {
    "real-models": Table(
        corner="tokens/s per GPU (peak GiB, MFU %)",
        parts=("speed", "peak", "MFU"),
        ratios=(TO_FSDP2,),
    ),
    "recipes": Table(
        corner="tokens/s per GPU (peak GiB, MFU %)",
        parts=("speed", "peak", "MFU"),
    ),
    "fsdp2-four-h200": Table(corner=SPEED, parts=("speed", "peak"), ratios=(TO_FSDP2,)),
    "grids-four-h200": Table(corner=SPEED, parts=("speed", "peak")),
    "fsdp2-two-h200": Table(corner=SPEED, parts=("speed", "peak"), ratios=(TO_FSDP2,)),
    "fsdp2-two-h100": Table(corner=SPEED, parts=("speed", "peak"), ratios=(TO_FSDP2,)),
    "narrow": Table(corner="ms per step", parts=("time",)),
    "float8": Table(
        corner="tokens/s (peak GiB, loss)",
        parts=("speed", "peak", "loss after 11 steps"),
        ratios=(TO_FSDP2,),
    ),
    "pipelines": BESIDE_TORCH_PIPELINES,
    "pipelines-four-h200": BESIDE_TORCH_PIPELINES,
    "pipelines-two-h100": Table(
        corner="tokens/s per GPU",
        parts=("speed",),
        ratios=(Ratio(name="bmt to torch", above=("bmt",), below=("torch",)),),
    ),
    "pipeline-schedules": Table(
        corner=SPEED,
        parts=("speed", "peak"),
        ratios=(
            Ratio(
                name="the drop-in list to GPipe",
                above=("bmt, the drop-in list",),
                below=("torch, GPipe",),
            ),
            Ratio(
                name="interleaved to interleaved",
                above=("bmt, interleaved, 2 chunks",),
                below=("torch, interleaved, 2 stages a rank",),
            ),
        ),
        leaves_out=("one stage alone, nothing communicated", *TORCH_STAGES, *OUR_STAGES),
    ),
    "pipeline-training": Table(corner=SPEED, parts=("speed", "peak")),
    "tensor-parallel-block": Table(
        corner="ms per block (peak GiB of a chain of 4)",
        parts=("time", "peak"),
        ratios=(
            Ratio(
                name="bmt to DTensor, eager",
                above=("bmt, eager",),
                below=("DTensor, eager",),
                is_time=True,
            ),
            Ratio(
                name="bmt to the better DTensor, compiled",
                above=("bmt, compiled",),
                below=DTENSOR,
                is_time=True,
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
        ratios=(
            Ratio(
                name="bmt, none, to FSDP2 on the host",
                above=("bmt, none",),
                below=("FSDP2, states and parameters on the host",),
                is_time=True,
            ),
        ),
    ),
    "muon": Table(corner="ms per step of the optimizer", parts=("time",)),
    "kernels-cuda": Table(
        corner="10⁸ elements: ms (GB/s, to a copy)",
        parts=("time", "bandwidth", "of a copy"),
        layout=by_setting,
    ),
    "kernels-cross-entropy": Table(
        corner="bf16, 16384 rows: ms (to a copy)", parts=("time", "of a copy")
    ),
    "kernels-cpu": Table(corner="ms (quickest)", parts=("median", "quickest")),
    "collectives-small": Table(
        corner="µs, in a row (torch's)", parts=("bmt", "torch"), layout=by_operation
    ),
    "collectives-large": Table(
        corner="GB/s (torch's)", parts=("bmt", "torch"), layout=by_operation
    ),
    "checkpoints-quiet": Table(corner="s", parts=("median",), ratios=(FASTER_THAN_DCP,)),
    "checkpoints": Table(corner="s (rounds)", parts=("median",)),
    "start-up": Table(corner="phase", parts=("",), layout=by_quantity),
    "rendezvous": Table(corner="", parts=("",), layout=by_column),
    "slow-link": Table(
        corner="",
        parts=("",),
        layout=by_column,
        ratios=(
            Ratio(
                name="bmt ZeRO-3 to FSDP2",
                above=("bmt ZeRO-3 over 4 ranks",),
                below=("FSDP2 over 4 ranks",),
                columns=("tokens/s",),
            ),
            *(
                Ratio(name=f"{row} to HSDP", above=(row,), below=(HSDP,), columns=("tokens/s",))
                for row in HYBRID
            ),
        ),
    ),
    "faults": Table(corner="a rank …", parts=("",), layout=by_column),
    "soak": Table(corner="", parts=("",), layout=by_column),
}


def table_lines(table: Table, found: Sequence[Record]) -> list[str]:
    """Return the lines of a table, and below it where its values come from."""
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in found:
        row, column, part = table.layout(record)
        if row not in table.leaves_out:
            cells.setdefault((row, column), {})[part] = record
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [[table.corner, *columns], ["---"] * (1 + len(columns))]
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
    return [f"| {' | '.join(line)} |" for line in lines] + ["", *source_lines(found)]


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
    """Return date, device, versions and commits of measurements, and their commands."""
    parts = []
    for field in ("device", "date", "torch", "commit"):
        values = dict.fromkeys(getattr(record, field) for record in found)
        text = " and ".join(values)
        parts.append(text if field in ("device", "date") else f"{field} {text}")
    commands = dict.fromkeys(record.command for record in found)
    kept = [each for each in commands if not is_gone(each)]
    gone = [each for each in commands if is_gone(each)]
    lines = [f"{', '.join(parts)}:", ""]
    if kept:
        lines += ["```sh", *kept, "```"]
    if kept and gone:
        lines += [""]
    if gone:
        lines += ["With what the tree had at that commit:", "", "```text", *gone, "```"]
    return lines


def is_gone(command: str) -> bool:
    """Whether what ``command`` starts is no more in the tree."""
    bench, script = re.match(r"tools/bench (\S+)", command), re.match(r"python (\S+)", command)
    if bench is not None:
        return bench[1] not in COMMANDS
    return script is not None and not (DOCS.parent / script[1]).exists()


def with_tables(text: str) -> str:
    """Return the page ``text`` with its tables as the records have them now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: tools/benchmark_page.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        new = "\n".join([begin, "", *table_lines(table, records(name)), "", end])
        text, count = pattern.subn(new.replace("\\", r"\\"), text)
        if count != 1:
            raise ValueError(f"The page must have {begin} and {end} once, not {count} times.")
    return text


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A picture of the first quantity of a file: a group of bars for each setting, a bar for each
    of some rows.
    """

    name: str
    title: str
    peers: Sequence[str]
    ours: Sequence[str]
    settings: Sequence[str] = ()
    """Those that are drawn; empty: all."""

    def draw(self, path: Path) -> None:
        """Write the picture to ``path``."""
        part = TABLES[self.name].parts[0]
        found = [record for record in records(self.name) if record.quantity == part]
        values = {(record.toolkit, record.setting): record.value for record in found}
        settings = self.settings or tuple(dict.fromkeys(record.setting for record in found))
        rows = [
            *zip(self.peers, PEER_COLORS, strict=False),
            *zip(self.ours, OUR_COLORS, strict=False),
        ]
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.subplots()
        width = 0.9 / len(rows)
        for number, (row, color) in enumerate(rows):
            places = [place + width * (number + 0.5) - 0.45 for place in range(len(settings))]
            texts = [values[row, setting] for setting in settings]
            bars = axes.bar(places, list(map(float, texts)), 0.96 * width, color=color, label=row)
            axes.bar_label(bars, texts)
        axes.set_xticks(range(len(settings)), settings)
        axes.yaxis.set_visible(False)
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.margins(y=0.12)
        axes.set_title(f"{found[0].device}, {found[0].date}, commit {found[0].commit}", fontsize=9)
        figure.suptitle(self.title, fontsize=11)
        figure.legend(loc="outside lower center", ncols=len(rows), frameon=False)
        # Texts as texts, which tests find; the same bytes each time.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            figure.savefig(path, metadata={"Date": None})


PICTURES = {
    "benchmark-fsdp2.svg": Bars(
        name="fsdp2-four-h200",
        title="Training beside FSDP2: tokens/s per GPU, 12.7 billion parameters. More is better.",
        peers=("FSDP2",),
        ours=("bmt",),
        settings=("batch 1", "batch 4", "batch 8", "batch 32"),
    ),
    "benchmark-pipelines.svg": Bars(
        name="pipelines",
        title="Pipelines beside torch.distributed.pipelining: tokens/s per GPU. More is better.",
        peers=TORCH_STAGES,
        ours=OUR_STAGES,
    ),
    "benchmark-tensor-parallel.svg": Bars(
        name="tensor-parallel-block",
        title="A tensor-parallel block beside DTensor: milliseconds. Less is better.",
        peers=("DTensor, eager", "DTensor, compiled"),
        ours=("bmt, eager", "bmt, compiled"),
    ),
    "benchmark-checkpoints.svg": Bars(
        name="checkpoints-quiet",
        title="Checkpoints of 2.0 GB beside torch.distributed.checkpoint: seconds. Less is better.",
        peers=(DCP,),
        ours=("bmt, a directory",),
        settings=("save", "load"),
    ),
}


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    for name, bars in PICTURES.items():
        bars.draw(IMAGES / name)
