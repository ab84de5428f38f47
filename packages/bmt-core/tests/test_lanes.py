"""On the CPU, a lane does what follows its collectives in its order, whoever waits first."""

from __future__ import annotations

import pytest
import torch

from bmt_core.comm import Group
from bmt_core.run.lanes import Lane, Mark
from bmt_core.run.runtime import current
from bmt_core.testing import run_ranks


def sums_in_a_lane(waits_for: list[int]) -> list[float]:
    """The first collective writes to ``total``; what follows the second and the third uses ``total``."""
    lane = current().lanes.named("test")
    group: Group = lane.group(current().world)
    total, added = torch.empty(1), torch.ones(1)

    def add() -> None:
        total.add_(added)

    def double() -> None:
        total.mul_(2)

    marks: list[Mark] = [
        lane.run(lambda: group.reduce_scatter(total, torch.full((group.size,), 5.0))),
        lane.run(lambda: group.all_reduce(added), add),
        lane.run(lambda: group.all_reduce(torch.ones(1)), double),
    ]
    for number in waits_for:
        marks[number].wait()
    return total.tolist()


@pytest.mark.parametrize("waits_for", [[2], [2, 1, 0], [1, 2], [0, 1, 2], [0, 2, 2, 1]], ids=str)
def test_what_follows_a_collective_sees_the_results_of_those_before_it(waits_for: list[int]) -> None:
    assert run_ranks(sums_in_a_lane, 2, waits_for) == [[(5.0 * 2 + 2) * 2]] * 2


def unfinished_marks() -> int:
    lane = current().lanes.named("test")
    assert type(lane) is Lane
    group = lane.group(current().world)
    kept = [lane.run(lambda: group.all_reduce(torch.ones(1))) for _ in range(20)]
    for mark in kept[::2]:
        mark.wait()
    del mark, kept
    return len(lane._unfinished)


def test_a_lane_keeps_no_marks_that_were_waited_for_or_forgotten() -> None:
    assert run_ranks(unfinished_marks, 2) == [0, 0]
