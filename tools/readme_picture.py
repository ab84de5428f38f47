#!/usr/bin/env python3
"""Draw the picture of the README: speed and memory on real models beside FSDP2, from
``docs/results/real-models.jsonl``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark_page import IMAGES, OUR_COLORS, PEER_COLORS, Record, records

PICTURE = IMAGES / "benchmark-real-models.svg"
SETTINGS = {
    "compiled": "Llama 3 8B\ncompiled",
    "eager": "Llama 3 8B\neager",
    "LoRA, eager, batch 4": "Llama 3 8B\nLoRA",
    "MoE, eager, batch 4": "Qwen3 MoE\nbatch 4",
    "MoE, eager, batch 1": "Qwen3 MoE\nbatch 1",
}
"""Settings of the records, in order, and how the picture calls them."""
TOOLKITS = (("FSDP2", PEER_COLORS[0]), ("bmt", OUR_COLORS[0]))


def draw(path: Path) -> None:
    """Write the picture to ``path``."""
    found = [record for record in records("real-models") if record.setting in SETTINGS]
    figure = Figure(figsize=(9, 5), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    bars(speed, [record for record in found if record.quantity == "speed"])
    speed.set_title("tokens/s per GPU: more is better", fontsize=10, loc="left")
    bars(memory, [record for record in found if record.quantity == "peak"])
    memory.set_title("peak memory, GiB per GPU: less is better", fontsize=10, loc="left")
    memory.set_xticks(range(len(SETTINGS)), list(SETTINGS.values()))
    first = found[0]
    figure.suptitle(f"bmt and FSDP2 at its best, {first.device}, {first.date}", fontsize=11)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    # Texts as texts, which tests find; the same bytes each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def bars(axes: Axes, found: list[Record]) -> None:
    """Draw a bar for each toolkit and setting."""
    values = {(record.toolkit, record.setting): record.value for record in found}
    width = 0.9 / len(TOOLKITS)
    for number, (toolkit, color) in enumerate(TOOLKITS):
        places = [place + width * (number + 0.5) - 0.45 for place in range(len(SETTINGS))]
        texts = [values[toolkit, setting] for setting in SETTINGS]
        drawn = axes.bar(places, list(map(float, texts)), 0.96 * width, color=color, label=toolkit)
        axes.bar_label(drawn, texts)
    axes.yaxis.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.margins(y=0.15)


if __name__ == "__main__":
    draw(PICTURE)
