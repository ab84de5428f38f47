#!/usr/bin/env python3
"""Write the tables of ``docs/memory.md`` and the computed one of ``docs/recipes.md``: memory and
traffic of a training, by formulas.

``python3 tools/memory_table.py`` writes them into the pages. A test compares the pages with the
formulas, and the formulas with peaks that were measured on GPUs (``docs/results``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
GPUS = (8, 16, 64)
TOKENS = 8192
"""Tokens of one GPU in a step, for the tables."""
ROOM = 72e9
"""Bytes that a training may take of a GPU of 80 GB: nine tenths."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder like Llama's; weights are bfloat16."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    key_values: int
    vocabulary: int = 32000

    @property
    def block(self) -> int:
        """Parameters of one layer: attention, gated feed-forward, two norms."""
        attention = 2 * self.hidden * (self.hidden + self.key_values)
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside of layers: embedding, head, last norm."""
        return (2 * self.vocabulary + 1) * self.hidden

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layers * self.block + self.outside


MODELS = (
    Model(name="7B", layers=32, hidden=4096, feed_forward=11008, key_values=4096),
    Model(name="13B", layers=40, hidden=5120, feed_forward=13824, key_values=5120),
    Model(name="70B", layers=80, hidden=8192, feed_forward=28672, key_values=1024),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas know of a model."""

    layers: int
    hidden: int
    block: int
    outside: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        """Return the sizes of ``model``."""
        return cls(
            layers=model.layers, hidden=model.hidden, block=model.block, outside=model.outside
        )


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes per parameter."""

    weight: int = 2
    gradient: int = 2
    state: int = 10
    """Of the optimizer on the device: two float32 moments, and 2 bytes or 4 for the master."""
    host: int = 0


COMPACT = Bytes()
FLOAT32_MASTER = Bytes(state=12)
OFFLOADED = Bytes(state=0, host=14)
FLOAT32 = Bytes(weight=4, gradient=4, state=8)


def device_bytes(
    model: Sizes,
    *,
    level: int,
    shard: int,
    tokens: int,
    each: Bytes = COMPACT,
    states: int | None = None,
) -> float:
    """Return the largest memory of one GPU in a step of one micro-batch, every block recomputed.

    ``shard`` GPUs hold the parts of one copy; with ``optimizer_shards="all"``, ``states`` GPUs have
    the weights, gradients and states once, and ``shard`` GPUs a second copy of the blocks' weights
    (not at level 0). There are two moments to look at: the end of forward,
    with the inputs of all blocks and, at level 2, all weights; and the end of backward, with
    all gradients. In both a layer is computed: its activations take about 34 bytes per token and
    feature (Korthikanti et al. 2022, section 4.1, without the attention matrix).
    """
    blocks = model.layers * model.block
    total = blocks + model.outside
    parts = 1 if level == 0 else states or shard
    kept = (each.weight + each.state) * total / parts
    if states is not None and level > 0:
        kept += each.weight * blocks / shard
    gradients = each.gradient * total / parts
    if level == 1 and shard > 1:
        kept += each.weight * blocks
    buffers = 0.0
    if shard > 1 and level > 0:
        # Two blocks of weights and two of gradients; what is outside of blocks is whole at once.
        buffers = (each.weight + each.gradient) * model.outside + 2 * each.gradient * model.block
    two_blocks = 2 * each.weight * model.block if shard > 1 and level >= 2 else 0
    after_forward = model.layers * model.block * each.weight if shard > 1 else 0
    layer = 34 * tokens * model.hidden
    inputs = 2 * tokens * model.hidden * model.layers
    end_of_forward = kept + buffers + layer + inputs
    end_of_forward += after_forward if level == 2 else two_blocks
    return max(end_of_forward, kept + buffers + layer + gradients + two_blocks)


def host_bytes(model: Sizes, *, shard: int, each: Bytes) -> float:
    """Return the page-locked memory of the host for one GPU."""
    return each.host * (model.layers * model.block + model.outside) / shard


def received_bytes(
    model: Sizes, *, level: int, shard: int, micro_batches: int = 1, each: Bytes = COMPACT
) -> float:
    """Return the bytes that one GPU receives in a step, for gathers and reductions of its shard
    group; Blocks of levels 0 and 1 reduce once per step, under ``no_sync``.
    """
    times = micro_batches if level >= 2 else 1
    gathers = {0: 0, 1: model.layers, 2: model.layers, 3: 2 * model.layers - 2}[level]
    # An all-reduce receives what a gather and a reduction receive, and sums in float32.
    reduced = model.layers * (each.gradient if level else 2 * 4)
    blocks = times * model.block * (gathers * each.weight + reduced)
    outside = micro_batches * model.outside * (each.weight + each.gradient)
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

    head = ["model", "GPUs", "level 3", "level 2", "level 0"]
    head += ["level 3, Adam on the host", "host memory"]
    lines = [row(head), row(["---"] * len(head))]
    for model in MODELS:
        sizes = Sizes.of(model)
        for gpus in GPUS:
            cells = [model.name, f"{gpus:,}"]
            cells += [
                cell(device_bytes(sizes, level=level, shard=gpus, tokens=TOKENS))
                for level in (3, 2, 0)
            ]
            away = device_bytes(sizes, level=3, shard=gpus, tokens=TOKENS, each=OFFLOADED)
            cells += [cell(away), gib(host_bytes(sizes, shard=gpus, each=OFFLOADED))]
            lines.append(row(cells))
    return lines


def traffic_table() -> list[str]:
    """Return the lines of the table of traffic."""
    head = ["model", "level 3", "levels 1 and 2", "level 0"]
    lines = [row(head), row(["---"] * len(head))]
    for model in MODELS:
        sizes = Sizes.of(model)
        traffic = [received_bytes(sizes, level=level, shard=64) for level in (3, 2, 0)]
        lines.append(row([model.name, *map(gib, traffic)]))
    return lines


def shard_table() -> list[str]:
    """Return the lines of the table of hybrid sharding at 1,024 GPUs, level 3."""
    columns = [(8, None), (8, 1024), (64, None), (1024, None)]
    heads = [
        f"shard_size {size:,}{'' if states is None else ', states over all'}"
        for size, states in columns
    ]
    lines = [row(["model", *heads]), row(["---"] * (len(columns) + 1))]
    for model in MODELS:
        cells = [model.name]
        for size, states in columns:
            found = device_bytes(Sizes.of(model), level=3, shard=size, tokens=TOKENS, states=states)
            cells.append(f"**{gib(found)}**" if found <= ROOM else gib(found))
        lines.append(row(cells))
    return lines


def recipe_table() -> list[str]:
    """Return the lines of the table of models and GPUs: the memory at level 3, with Adam's states
    on the host if it does not fit otherwise.
    """
    head = ["GPUs of 80 GB", *(model.name for model in MODELS)]
    lines = [row(head), row(["---"] * len(head))]
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        lines.append(row([str(gpus), *(fitting(Sizes.of(model), gpus) for model in MODELS)]))
    return lines


def fitting(sizes: Sizes, gpus: int) -> str:
    """Return the memory of a GPU as :func:`recipe_table` shows it; "no": more than there is."""
    for each, mark in ((COMPACT, ""), (OFFLOADED, " (host)")):
        found = device_bytes(sizes, level=3, shard=gpus, tokens=TOKENS, each=each)
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
