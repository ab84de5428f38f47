"""``pairwise``: the cells of a grid of tests in which every two values meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def pairwise(
    *values: Iterable[Any], allowed: Callable[..., bool] = lambda *cell: True
) -> list[tuple[Any, ...]]:
    """Return few cells of the grid of ``values`` in which every two values that meet in the grid
    meet: for ``pytest.mark.parametrize("a, b, c", pairwise(...))`` in place of a large grid, since
    most mistakes need two settings. ``allowed(*cell)`` says which cells the grid has.

    Each next cell is the one with most pairs that are not there yet: a greedy cover. The grid has
    at most some thousand cells.
    """
    parameters = [list(each) for each in values]
    # By their indices: values need not be hashable.
    cells = {
        indices: tuple(parameter[i] for parameter, i in zip(parameters, indices, strict=True))
        for indices in product(*map(range, map(len, parameters)))
    }
    pairs = {
        indices: set(combinations(enumerate(indices), 2))
        for indices, cell in cells.items()
        if allowed(*cell)
    }
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda indices: len(pairs[indices] & missing))
        missing -= pairs[best]
        chosen.append(cells[best])
    return chosen
