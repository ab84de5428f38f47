#!/usr/bin/env python3
"""Draw the pictures of ``docs/concepts.md``: the grid, hybrid sharding, tensor-parallel layers, a
flat layout, a step at each level.

``.venv/bin/python tools/concept_pictures.py`` writes them into ``docs/images``. Grids and layout
are those of bmt's own ``Topology`` and ``flat_layout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from bmt_core import Topology
from bmt_zero import flat_layout

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GRAY = "#888888"


@dataclass
class Picture:
    """An SVG that grows by rectangles and texts."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def rectangle(
        self, x: float, y: float, width: float, height: float, color: str, text: str = ""
    ) -> None:
        """Draw a filled rectangle with ``text`` in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"'
            ' stroke="#ffffff"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, color="#ffffff", anchor="middle")

    def text(
        self, x: float, y: float, text: str, *, color: str = "#222222", anchor: str = "start"
    ) -> None:
        """Write ``text`` with its base line at ``y``."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}"'
            f' viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="12">'
        )
        back = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join([head, back, *self.parts, "</svg>", ""])


def grid_picture() -> Picture:
    """Draw eight ranks with ``pp=2, dp=2, tp=2``."""
    topology = Topology({"pp": 2, "dp": 2, "tp": 2})
    picture = Picture(620, 210)
    for stage in range(2):
        left = 20 + 300 * stage
        picture.text(left, 22, f"stage {stage} (pp): layers of its own")
        for data in range(2):
            top = 36 + 60 * data
            for part in range(2):
                (rank,) = [
                    rank
                    for rank in range(topology.world_size)
                    if [topology.axis_rank(axis, rank) for axis in ("pp", "dp", "tp")]
                    == [stage, data, part]
                ]
                picture.rectangle(left + 75 * part, top, 70, 50, COLORS[data], f"rank {rank}")
            picture.text(left + 158, top + 22, f"batch {data} (dp)")
            picture.text(left + 158, top + 38, "two halves (tp)")
    shards = " ".join(str(list(ranks)) for ranks in topology.shard_ranks({"pp", "tp"}))
    picture.text(20, 178, f"A slice of a layer is sharded over the ranks of dp: {shards}")
    everybody = " ".join(str(list(ranks)) for ranks in topology.shard_ranks())
    picture.text(20, 196, f"What is outside of the layers is sharded over all: {everybody}")
    return picture


def hybrid_picture() -> Picture:
    """Draw eight ranks on two hosts with ``shard_size=4``."""
    topology = Topology({"replica": 2, "dp": 4})
    picture = Picture(620, 190)
    for host, ranks in enumerate(topology.shard_ranks()):
        top = 30 + 70 * host
        picture.text(20, top + 28, f"host {host}")
        for part, rank in enumerate(ranks):
            left = 80 + 130 * part
            picture.rectangle(left, top, 120, 50, COLORS[part], f"rank {rank}: part {part}")
    shards = " ".join(str(list(ranks)) for ranks in topology.shard_ranks())
    picture.text(20, 20, f"Gathers, and the first sum of gradients, inside of a host: {shards}")
    replicas = " ".join(str(list(ranks)) for ranks in topology.ranks({"replica"}))
    picture.text(20, 178, f"Then each part of the gradients is summed between hosts: {replicas}")
    return picture


def tensor_parallel_picture() -> Picture:
    """Draw two linear layers, one cut by its outputs and one by its inputs, on two ranks."""
    picture = Picture(620, 200)
    boxes = [("input", 20, 60), ("up", 120, 100), ("hidden", 260, 60), ("down", 360, 100)]
    for rank in range(2):
        top = 34 + 66 * rank
        picture.text(20, top + 60, f"rank {rank}")
        for name, left, width in boxes:
            color = GRAY if name == "input" else COLORS[rank]
            text = name if name == "input" else f"{name}: half"
            picture.rectangle(left, top, width + (30 if name == "hidden" else 0), 44, color, text)
    picture.rectangle(500, 34, 100, 110, GRAY, "sum of both")
    picture.text(20, 22, "both have it")
    picture.text(120, 22, "half of its outputs")
    picture.text(360, 22, "half of its inputs")
    picture.text(500, 22, "one collective")
    picture.text(20, 178, "Each rank computes half of the hidden features.")
    picture.text(20, 194, "Nothing is sent between up and down.")
    return picture


def layout_picture() -> Picture:
    """Draw three parameters, back to back, cut into four equal slices."""
    shapes = {"weight 64 × 32": 64 * 32, "weight 48 × 32": 48 * 32, "bias 48": 48}
    layout = flat_layout(list(shapes.values()), itemsize=4, ranks=4)
    picture = Picture(620, 150)
    scale = 580 / layout.total
    for name, offset, color in zip(shapes, layout.offsets, COLORS, strict=False):
        picture.rectangle(20 + offset * scale, 36, shapes[name] * scale, 36, color)
        picture.text(20 + offset * scale, 26, name)
    for rank in range(layout.ranks):
        left = 20 + rank * layout.slice_length * scale
        width = layout.slice_length * scale
        picture.rectangle(left, 84, width, 26, GRAY, f"rank {rank}: {layout.slice_length}")
    used = sum(layout.numels)
    picture.text(
        20,
        134,
        f"{used} elements and {layout.total - used} of padding. Slices are equal.",
    )
    return picture


@dataclass(frozen=True)
class Event:
    """Something that happens to ``layer`` from ``begin`` on."""

    lane: str
    layer: int
    begin: float
    length: float


LAYERS = 4
FORWARD, BACKWARD, TRANSFER = 1.0, 2.0, 0.8


def step_events(level: int) -> Iterator[Event]:
    """Yield what a step of :data:`LAYERS` layers does: see the tables of docs/architecture.md."""
    start = TRANSFER if level > 0 else 0.0
    for layer in range(LAYERS):
        if level > 0:
            gather = 0.0 if layer == 0 else start + (layer - 1) * FORWARD
            yield Event("gather", layer, gather, TRANSFER)
        yield Event("compute", layer, start + layer * FORWARD, FORWARD)
    begin = start + LAYERS * FORWARD
    for layer in reversed(range(LAYERS)):
        # The last two layers are still there; each other one is gathered during the one before it.
        if level == 3 and layer < LAYERS - 2:
            yield Event("gather", layer, begin - BACKWARD, TRANSFER)
        yield Event("compute", layer, begin, BACKWARD)
        begin += BACKWARD
        yield Event("reduce", layer, begin, TRANSFER * (2 if level == 0 else 1))


def whole_layers(level: int) -> list[tuple[float, int]]:
    """Return from when on how many layers are whole on a rank, in order of time."""
    events = list(step_events(level))
    if level in (0, 1):
        return [(0.0, LAYERS)]
    changes = [(event.begin, 1) for event in events if event.lane == "gather"]
    for layer in range(LAYERS):
        forward, backward = [e for e in events if e.lane == "compute" and e.layer == layer]
        changes.append((backward.begin + backward.length, -1))
        if level == 3 and layer < LAYERS - 2:
            changes.append((forward.begin + forward.length, -1))
    counts: list[tuple[float, int]] = []
    count = 0
    for time in sorted({time for time, _ in changes}):
        count += sum(change for when, change in changes if when == time)
        counts.append((time, count))
    return counts


def levels_picture() -> Picture:
    """Draw a step at levels 3, 2, 1 and 0: lanes of work, and how many layers are whole."""
    heights = {"gather": 0, "compute": 22, "reduce": 44}
    picture = Picture(700, 20 + 4 * 132)
    scale, left = 41.0, 112
    for number, level in enumerate((3, 2, 1, 0)):
        top = 18 + 132 * number
        picture.text(8, top + 14, f"level {level}")
        for lane, height in heights.items():
            if lane == "gather" and level == 0:
                continue
            name = "all-reduce" if lane == "reduce" and level == 0 else lane
            picture.text(left - 8, top + height + 14, name, anchor="end")
        events = list(step_events(level))
        for event in events:
            picture.rectangle(
                left + event.begin * scale,
                top + heights[event.lane],
                event.length * scale,
                20,
                COLORS[event.layer],
                str(event.layer + 1),
            )
        end = max(event.begin + event.length for event in events)
        counts = whole_layers(level)
        times = [time for time, _ in counts[1:]] + [end]
        for (begin, count), until in zip(counts, times, strict=True):
            height = 8 * count
            picture.rectangle(
                left + begin * scale, top + 104 - height, (until - begin) * scale, height, GRAY
            )
        most = max(count for _, count in counts)
        picture.text(left - 8, top + 100, f"whole: {most}", anchor="end")
    return picture


PICTURES = {
    "concept-grid.svg": grid_picture,
    "concept-hybrid.svg": hybrid_picture,
    "concept-tensor-parallel.svg": tensor_parallel_picture,
    "concept-layout.svg": layout_picture,
    "concept-levels.svg": levels_picture,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw().svg())
