"""Arithmetic of intervals of time: (start, end). Results are sorted and disjoint, arguments need
not be.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union; what is apart by at most ``gap`` becomes one.

    >>> merge([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    >>> merge([(0, 2), (3, 4)], gap=1)
    [(0, 4)]
    """
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the union.

    >>> total([(0, 2), (1, 3), (5, 6)])
    4
    """
    return sum(end - start for start, end in merge(intervals))


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return what lies in ``intervals`` and not in ``others``.

    >>> subtract([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    left: list[Interval] = []
    holes = merge(others)
    first = 0
    for start, end in merge(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_end in holes[first:]:
            if hole_start >= end:
                break
            if start < hole_start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """Return what lies inside ``bounds``.

    >>> clip([(0, 2), (3, 9)], (1, 4))
    [(1, 2), (3, 4)]
    """
    start, end = bounds
    return merge((max(left, start), min(right, end)) for left, right in intervals)
