"""``cells`` and ``run_cells`` call every case, each as a start of its own would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmt_core.run.runtime import current, rank
from bmt_testing import run_ranks
from cells import cells, run_cells


class Left:
    """What a cell leaves in the run."""

    def __init__(self, run: object) -> None:
        self.calls = 0


def case(first: int, second: str) -> tuple[int, str, int, float, int]:
    left = current().state(Left)
    left.calls += 1
    return first, second, left.calls, torch.rand(()).item(), rank()


def decorated() -> list[Any]:
    found: list[Any] = []

    @cells("first", lambda size: range(size))
    @cells("second", ["a", "b"])
    def test(first: int, second: str) -> None:
        found.append(case(first, second))

    test()
    return found


def failing() -> str:
    @cells("first, second", [(1, "a"), (2, "b"), (3, "c")])
    def test(first: int, second: str) -> None:
        assert first < 2

    with pytest.raises(AssertionError) as raised:
        test()
    return str(raised.value.__notes__)


def test_all_cells_run_each_with_the_seed_and_without_what_others_left() -> None:
    for index, found in enumerate(run_ranks(decorated, 2)):
        assert [each[:2] for each in found] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
        assert {(calls, number) for _, _, calls, _, number in found} == {(1, index)}
        assert len({drawn for *_, drawn, _ in found}) == 1


def test_results_of_a_function_come_with_their_cells_and_of_all_ranks() -> None:
    found = run_cells(case, 2, [(1, "a"), (2, "b")])
    assert [cell for cell, _ in found] == [(1, "a"), (2, "b")]
    for cell, of_ranks in found:
        assert [(each[:2], each[2], each[4]) for each in of_ranks] == [(cell, 1, 0), (cell, 1, 1)]


def test_an_error_names_its_cell() -> None:
    for said in run_ranks(failing, 2):
        assert "In the cell (2, 'b')." in said
