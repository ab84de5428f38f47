"""Every two values meet in a cell."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import pairwise


def test_every_two_values_meet() -> None:
    values = [[0, 1, 2, 3], "ab", [True, False], [5, 6, 7]]
    cells = pairwise(*values)
    assert len(cells) < 20 and len(set(cells)) == len(cells)
    for (i, first), (j, second) in combinations(enumerate(values), 2):
        for pair in product(first, second):
            assert any((cell[i], cell[j]) == pair for cell in cells)


def test_cells_that_are_not_allowed_are_left_out() -> None:
    cells = pairwise([1, 2, 3], [1, 2, 3], "ab", allowed=lambda a, b, c: a <= b)
    assert {(a, b) for a, b, _ in cells} == {(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)}
    assert {(a, c) for a, _, c in cells} == set(product([1, 2, 3], "ab"))
