"""A timeline as SVG: one row per kind of work, small enough for a document however many kernels
there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bench.intervals import Interval, merge

_WIDTH, _LEFT, _TOP = 1200.0, 70.0, 30.0
_ROW, _BAR = 34.0, 24.0
_COLOURS = {
    "compute": "#4c78a8",
    "gather": "#f2b880",
    "reduce": "#a8cf9a",
    "exchange": "#f2b880",
    "other": "#b0b0b0",
}
_STRONG = "#d62728"
_NUM_TICKS = 8


def draw(
    title: str,
    bounds: Interval,
    rows: Mapping[str, Sequence[Interval]],
    strong: Mapping[str, Sequence[Interval]],
) -> str:
    """Return the picture; times are in microseconds, the axis is in milliseconds from the start
    of ``bounds``.

    ``strong`` holds the parts of rows to be drawn in red. Gaps of less than half a pixel
    are closed.
    """
    scale = _WIDTH / (bounds[1] - bounds[0])
    bottom = _TOP + _ROW * len(rows)
    width, height = _LEFT + _WIDTH + 20, bottom + 24
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="{_LEFT:g}" y="18" font-size="14">{escape(title)}; exposed in red</text>',
    ]
    for number, (name, intervals) in enumerate(rows.items()):
        top = _TOP + _ROW * number
        parts.append(
            f'<text x="{_LEFT - 8:g}" y="{top + 17:g}" text-anchor="end">{escape(name)}</text>'
        )
        for colour, drawn in (
            (_COLOURS.get(name, "black"), intervals),
            (_STRONG, strong.get(name, ())),
        ):
            if drawn:
                parts.append(f'<path fill="{colour}" d="{_bars(drawn, bounds[0], scale, top)}"/>')
    for tick in _ticks((bounds[1] - bounds[0]) / 1000):
        x = _LEFT + tick * 1000 * scale
        parts.append(f'<path stroke="#ccc" d="M{x:.1f} {_TOP:g}V{bottom:g}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{tick:g} ms</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _bars(intervals: Sequence[Interval], origin: float, scale: float, top: float) -> str:
    """Return the path of all bars of a row: one element instead of thousands."""
    pixels = [
        (_LEFT + (start - origin) * scale, _LEFT + (end - origin) * scale)
        for start, end in intervals
    ]
    return "".join(
        f"M{start:.1f} {top:g}h{max(end - start, 0.3):.1f}v{_BAR:g}h-{max(end - start, 0.3):.1f}z"
        for start, end in merge(pixels, gap=0.5)
    )


def _ticks(length: float) -> list[float]:
    """Return round numbers from 0 to ``length``.

    >>> _ticks(230.0)
    [0.0, 50.0, 100.0, 150.0, 200.0]
    """
    step = 10.0**-3
    for factor in [factor * 10.0**power for power in range(-3, 7) for factor in (1, 2, 5)]:
        step = factor
        if length / step <= _NUM_TICKS:
            break
    return [round(step * number, 6) for number in range(int(length / step) + 1)]
