#!/usr/bin/env python3
"""Write the tables of ``docs/memory.md`` and the computed one of ``docs/recipes.md``: memory and
traffic of a training, by formulas.

``.venv/bin/python tools/memory_table.py`` writes them into the pages. The memory is that of ``bmt
memory``, which a test compares with peaks that were measured; a test here compares the pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bmtrain._program.model_shape import MODELS, ModelShape
from bmtrain._program.step_memory import Memory, Setting, memory_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
GPUS = (8, 16, 64)
TOKENS = 8192
"""Tokens of one GPU in a step, for the tables."""
ROOM = 0.9 * 80 * 2**30
"""Bytes that a training may take of a GPU of 80 GB: nine tenths."""
SHOWN = {"7B": "llama2-7b", "13B": "llama2-13b", "70B": "llama2-70b"}


def memory(
    name: str,
    *,
    level: int,
    gpus: int,
    shard: int | None = None,
    states_over_all: bool = False,
    offload: bool = False,
) -> Memory:
    """Return the memory of one GPU in a step of one micro-batch, every block recomputed, by a loss
    without logits.
    """
    setting = Setting(
        gpus=gpus,
        sequence=TOKENS,
        level=level,
        shard_size=shard,
        shards_states_over_all=states_over_all,
        offload=offload,
        fused_loss=True,
    )
    return memory_of(MODELS[SHOWN[name]], setting)


def received_bytes(model: ModelShape, *, level: int, shard: int, micro_batches: int = 1) -> float:
    """Return the bytes that one GPU receives in a step in bfloat16, for gathers and reductions of
    its shard group; Blocks of levels 0 and 1 reduce once per step, under ``no_sync``.
    """
    times = micro_batches if level >= 2 else 1
    gathers = {0: 0, 1: model.layers, 2: model.layers, 3: 2 * model.layers - 2}[level]
    # An all-reduce receives what a gather and a reduction receive, and sums in float32.
    reduced = model.layers * (2 if level else 2 * 4)
    blocks = times * model.block * (gathers * 2 + reduced)
    outside = micro_batches * model.outside * (2 + 2)
    return (blocks + outside) * (shard - 1) / shard


def tokens_to_hide_traffic(*, flops: float, bandwidth: float, level: int = 3) -> float:
    """Return from how many tokens per GPU and micro-batch products take longer than the traffic.

    ``flops`` per second are those that products reach, ``bandwidth`` is in bytes per second of one
    GPU. A recomputed layer takes 8 operations per parameter and token, and level 3 receives 6
    bytes per parameter, levels 1 and 2 receive 4.
    """
    return (6 if level == 3 else 4) * flops / (8 * bandwidth)


def row(cells: Sequence[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def gib(number: float) -> str:
    """Return bytes in GiB, with three digits."""
    value = number / 2**30
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def memory_table() -> list[str]:
    """Return the lines of the table of memory; what fits into 80 GB is bold."""
    head = ["model", "GPUs", "level 3", "level 2", "level 0"]
    head += ["level 3, Adam on the host", "host memory"]
    lines = [row(head), row(["---"] * len(head))]
    for name in SHOWN:
        for gpus in GPUS:
            cells = [name, f"{gpus:,}"]
            cells += [cell(memory(name, level=level, gpus=gpus).peak) for level in (3, 2, 0)]
            away = memory(name, level=3, gpus=gpus, offload=True)
            lines.append(row([*cells, cell(away.peak), gib(away.host)]))
    return lines


def cell(number: float) -> str:
    """Return bytes in GiB, bold if they fit."""
    return f"**{gib(number)}**" if number <= ROOM else gib(number)


def traffic_table() -> list[str]:
    """Return the lines of the table of traffic."""
    head = ["model", "level 3", "levels 1 and 2", "level 0"]
    lines = [row(head), row(["---"] * len(head))]
    for name, model in SHOWN.items():
        traffic = [received_bytes(MODELS[model], level=level, shard=64) for level in (3, 2, 0)]
        lines.append(row([name, *map(gib, traffic)]))
    return lines


def shard_table() -> list[str]:
    """Return the lines of the table of hybrid sharding at 1,024 GPUs, level 3."""
    columns = [(8, False), (8, True), (64, False), (1024, False)]
    heads = [
        f"shard_size {size:,}{', states over all' if over_all else ''}"
        for size, over_all in columns
    ]
    lines = [row(["model", *heads]), row(["---"] * (len(columns) + 1))]
    for name in SHOWN:
        found = [
            memory(name, level=3, gpus=1024, shard=size, states_over_all=over_all).peak
            for size, over_all in columns
        ]
        lines.append(row([name, *map(cell, found)]))
    return lines


def recipe_table() -> list[str]:
    """Return the lines of the table of models and GPUs: the memory at level 3, with Adam's states
    on the host if it does not fit otherwise.
    """
    head = ["GPUs of 80 GB", *SHOWN]
    lines = [row(head), row(["---"] * len(head))]
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        lines.append(row([str(gpus), *(fitting(name, gpus) for name in SHOWN)]))
    return lines


def fitting(name: str, gpus: int) -> str:
    """Return the memory of a GPU as :func:`recipe_table` shows it; "no": more than there is."""
    for offload, mark in ((False, ""), (True, " (host)")):
        found = memory(name, level=3, gpus=gpus, offload=offload).peak
        if found <= ROOM:
            return f"{gib(found)}{mark}"
    return "no"


PAGES: dict[Path, dict[str, Callable[[], list[str]]]] = {
    DOCS / "memory.md": {"memory": memory_table, "traffic": traffic_table, "shards": shard_table},
    DOCS / "recipes.md": {"gpus": recipe_table},
}


def with_tables(page: Path) -> str:
    """Return the text of ``page`` with its tables as the formulas have them now."""
    text = page.read_text()
    for name, lines in PAGES[page].items():
        begin, end = f"<!-- {name}: tools/memory_table.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, found = pattern.subn("\n".join([begin, "", *lines(), "", end]), text)
        if found != 1:
            raise ValueError(f"The page must have {begin} and {end} once, not {found} times.")
    return text


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(with_tables(each))
