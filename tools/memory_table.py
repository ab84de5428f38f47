#!/usr/bin/env python3
"""Write the tables of ``docs/choosing.md``: memory and traffic of a training, by formulas.

``python3 tools/memory_table.py`` writes them into the page. The memory is that of ``bmt memory``,
which a test compares with peaks that were measured; a test here compares the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bmtrain._program.model_shape import MODELS, ModelShape
from bmtrain._program.step_memory import Memory, Setting, memory_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "choosing.md"
GPUS = (8, 64, 1024)
TOKENS = 8192
"""Tokens of one GPU in a step, for the tables."""
ROOM = 72e9
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

    def cell(number: float) -> str:
        return f"**{gib(number)}**" if number <= ROOM else gib(number)

    head = ["model", "GPUs", "level 3", "level 2", "level 1", "level 0"]
    head += ["level 3, states on the host", "host memory per GPU"]
    lines = [row(head), row(["---"] * len(head))]
    for name in SHOWN:
        for gpus in GPUS:
            cells = [name, f"{gpus:,}"]
            cells += [cell(memory(name, level=level, gpus=gpus).peak) for level in (3, 2, 1, 0)]
            away = memory(name, level=3, gpus=gpus, offload=True)
            lines.append(row([*cells, cell(away.peak), gib(away.host)]))
    return lines


def traffic_table() -> list[str]:
    """Return the lines of the table of traffic."""
    head = ["model", "GPUs", "level 3", "levels 1 and 2", "level 0"]
    lines = [row(head), row(["---"] * len(head))]
    for name, model in SHOWN.items():
        for gpus in GPUS:
            traffic = [
                received_bytes(MODELS[model], level=level, shard=gpus) for level in (3, 2, 0)
            ]
            lines.append(row([name, f"{gpus:,}", *map(gib, traffic)]))
    return lines


def shard_table() -> list[str]:
    """Return the lines of the table of hybrid sharding at 1,024 GPUs, level 3."""
    columns = [(8, False), (16, False), (64, False), (8, True), (16, True), (1024, False)]
    heads = [
        f"shard_size {size:,}{', states over all' if over_all else ''}"
        for size, over_all in columns
    ]
    lines = [row(["model", *heads]), row(["---"] * (len(columns) + 1))]
    for name in SHOWN:
        cells = [name]
        for size, over_all in columns:
            found = memory(name, level=3, gpus=1024, shard=size, states_over_all=over_all).peak
            cells.append(f"**{gib(found)}**" if found <= ROOM else gib(found))
        lines.append(row(cells))
    return lines


def with_tables(text: str) -> str:
    """Return the page ``text`` with its tables as the formulas have them now."""
    tables = {"memory": memory_table(), "traffic": traffic_table(), "shards": shard_table()}
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: tools/memory_table.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, found = pattern.subn("\n".join([begin, "", *lines, "", end]), text)
        if found != 1:
            raise ValueError(f"The page must have {begin} and {end} once, not {found} times.")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
