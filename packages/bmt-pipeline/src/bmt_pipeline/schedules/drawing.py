"""A timeline as text for a terminal and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from rich.text import Text

from bmt_pipeline.schedules.schedule import Action, Kind, Schedule
from bmt_pipeline.schedules.timeline import Timeline

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
_STYLES = {
    Kind.FORWARD: "black on bright_blue",
    Kind.BACKWARD: "black on bright_green",
    Kind.INPUT_GRADIENT: "black on bright_cyan",
    Kind.WEIGHT_GRADIENT: "black on bright_yellow",
}
# Red, green, blue; light enough for black text, dark enough to be seen on white.
_COLOURS = {
    Kind.FORWARD: (122, 167, 240),
    Kind.BACKWARD: (111, 194, 127),
    Kind.INPUT_GRADIENT: (92, 195, 195),
    Kind.WEIGHT_GRADIENT: (227, 176, 75),
}
_COLUMNS_OF_SHORTEST = 4
_LABEL_WIDTH, _ROW, _BAR, _HEADER = 210, 30, 24, 64
_STYLE_SHEET = """
text { font: 12px sans-serif; fill: #1f2328; }
.inside { font-size: 10px; text-anchor: middle; fill: #000; }
.idle { fill: #8884; }
rect { stroke: #fff; stroke-width: 0.5; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } rect { stroke: #0d1117; } }
"""


def draw_text(timeline: Timeline, *, width: int) -> Text:
    """Return one line of at most ``width`` columns per stage: actions such as ``F3--``, and dots
    where it computes nothing.

    With several chunks the label is ``F3.1``: forward of micro-batch 3 in chunk 1. Labels without
    room are shortened.
    """
    schedule = timeline.schedule
    labels = [f"stage {stage} " for stage in range(schedule.stages)]
    label_width = max(map(len, labels))
    scale = _columns_per_time(timeline, max(width - label_width, 1))
    columns = int(timeline.makespan * scale)
    picture = Text()
    for label, spans in zip(labels, timeline.spans, strict=True):
        picture.append(("\n" if picture else "") + label.ljust(label_width))
        column = 0
        for action, start, end in spans:
            first, last = round(start * scale), round(end * scale)
            picture.append("·" * (first - column), "dim")
            picture.append(_label(action, schedule.chunks, last - first), _STYLES[action.kind])
            column = last
        picture.append("·" * (columns - column), "dim")
    return picture


def _columns_per_time(timeline: Timeline, width: int) -> float:
    """Return a scale by which the shortest action has a whole number of columns, if it can have one
    at all.
    """
    shortest = min(span.end - span.start for spans in timeline.spans for span in spans)
    available = width * shortest / timeline.makespan
    return min(_COLUMNS_OF_SHORTEST, int(available) or available) / shortest


def _label(action: Action, chunks: int, room: int) -> str:
    kind = action.kind.value
    whole = f"{kind}{action.micro_batch}"
    texts = [f"{whole}.{action.chunk}", whole, kind] if chunks > 1 else [whole, kind]
    text = next((text for text in texts if len(text) <= room), "")
    return text.ljust(room, "-")


def draw_svg(timeline: Timeline, *, width: int = 1200) -> str:
    """Return a self-contained SVG picture that reads on light and dark pages, with bubble and live
    activations per stage.
    """
    schedule = timeline.schedule
    scale = (width - _LABEL_WIDTH - 10) / timeline.makespan
    height = _HEADER + _ROW * schedule.stages + 10
    title = (
        f"{schedule.name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches,"
        f" chunks: {schedule.chunks}, a step takes {timeline.makespan:g}"
    )
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">'
        ),
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE_SHEET}</style>",
        f'<text x="10" y="20">{escape(title)}</text>',
        *_legend(schedule),
    ]
    for stage in range(schedule.stages):
        lines += _row(timeline, stage, scale)
    return "\n".join([*lines, "</svg>", ""])


def _legend(schedule: Schedule) -> Iterable[str]:
    used = {action.kind for order in schedule.orders for action in order}
    entries = [(f'fill="{_fill(kind, 0)}"', _NAMES[kind]) for kind in Kind if kind in used]
    entries.append(('class="idle"', "idle"))
    if schedule.chunks > 1:
        entries.append((f'fill="{_fill(Kind.FORWARD, 1)}"', "paler: later chunks"))
    for index, (look, name) in enumerate(entries):
        x = 10 + 150 * index
        yield (
            f'<rect x="{x}" y="32" width="14" height="14" {look}/><text x="{x + 20}"'
            f' y="44">{name}</text>'
        )


def _row(timeline: Timeline, stage: int, scale: float) -> Iterable[str]:
    y = _HEADER + _ROW * stage
    peak = timeline.schedule.peak_live(stage)
    yield (
        f'<text x="10" y="{y + 16}">stage {stage}: bubble {timeline.bubble(stage):.1%},'
        f" {peak} live</text>"
    )
    yield (
        f'<rect class="idle" x="{_LABEL_WIDTH}" y="{y}" width="{timeline.makespan * scale:.2f}"'
        f' height="{_BAR}"/>'
    )
    for action, start, end in timeline.spans[stage]:
        x, wide = _LABEL_WIDTH + start * scale, (end - start) * scale
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}"'
            f' fill="{_fill(action.kind, action.chunk)}">'
            f"<title>{_NAMES[action.kind]} of micro-batch {action.micro_batch}, chunk"
            f" {action.chunk}: {start:g} to {end:g}</title></rect>"
        )
        if wide >= 7 * len(str(action.micro_batch)):
            yield (
                f'<text class="inside" x="{x + wide / 2:.2f}"'
                f' y="{y + 16}">{action.micro_batch}</text>'
            )


def _fill(kind: Kind, chunk: int) -> str:
    """Return the colour of a kind of action, mixed with more white for later chunks."""
    white = min(0.3 * chunk, 0.6)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _COLOURS[kind])
