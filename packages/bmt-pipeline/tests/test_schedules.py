"""Schedules: times, memory that is asked for, and what is refused. What holds for all schedules is
in integration-tests/invariants/test_schedules.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules import (
    Action,
    Content,
    Kind,
    Placement,
    Schedule,
    Times,
    check_schedule,
    make_schedule,
    make_timeline,
    zero_bubble,
)

F, B, G, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT


def test_nothing_travels_in_the_middle_of_a_v() -> None:
    schedule = make_schedule("zero-bubble", 3, 4, 2)
    assert schedule.place_of(2)[0] == schedule.place_of(3)[0] == 2
    assert {output.part for output in schedule.sends(2, 1)} == {2, 3}
    assert all(
        output.content is Content.ACTIVATION for output in schedule.sends(2, 1) if output.part == 3
    )


@pytest.mark.parametrize("chunks", [1, 2])
def test_zero_bubble_fits_times_and_memory_that_are_asked_for(chunks: int) -> None:
    times = Times(forward=2, input_gradient=3, weight_gradient=1, transfer=0.5)
    tight = zero_bubble(4, 8, chunks, times=times, most_live=2 * chunks)
    check_schedule(tight)
    assert max(map(tight.peak_live, range(4))) <= 2 * chunks
    own, usual = (zero_bubble(4, 4, chunks, times=asked) for asked in (times, Times()))
    assert make_timeline(own, times).makespan <= make_timeline(usual, times).makespan
    with pytest.raises(ConfigError, match="most_live=0"):
        zero_bubble(4, 8, chunks, most_live=0)


def _two_stages(first: list[Action], second: list[Action]) -> Schedule:
    return Schedule(name="own", stages=2, micro_batches=2, orders=(tuple(first), tuple(second)))


GOOD = [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (GOOD[:3], "1 x F for micro-batch 1"),
        ([*GOOD, Action(F, 0)], "2 x F, 1 x B for micro-batch 0"),
        ([*GOOD, Action(W, 0)], "1 x F, 1 x B, 1 x W"),
        ([*GOOD, Action(F, 2)], "action F2, and there are 2 micro-batches"),
        ([*GOOD, Action(F, 0, 1)], "action F0 of chunk 1"),
        (
            [Action(B, 0), Action(F, 0), Action(F, 1), Action(B, 1)],
            "on stage 1, B0 waits for the activation of micro-batch 0",
        ),
        (
            [Action(F, 0), Action(W, 0), Action(G, 0), Action(F, 1), Action(B, 1)],
            "W0 waits for the gradient",
        ),
    ],
)
def test_an_order_that_cannot_run_is_refused(order: list[Action], message: str) -> None:
    check_schedule(_two_stages(GOOD, GOOD))
    with pytest.raises(ConfigError, match=message):
        check_schedule(_two_stages(GOOD, order))


def test_stages_that_wait_for_each_other_are_named() -> None:
    first = [Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)]
    second = [Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]
    with pytest.raises(
        ConfigError,
        match=(
            r"on stage 0, B0 waits for the gradient .* from part 1 on stage 1; on stage 1, F1 waits"
        ),
    ):
        make_schedule(_two_stages(first, second), 2, 2)


def test_a_schedule_may_be_given_in_place_of_a_name() -> None:
    own = _two_stages(GOOD, GOOD)
    assert make_schedule(own, 2, 2) is own
    with pytest.raises(ConfigError, match=r"made for .* \(2, 2, 1\), and the step has \(2, 3, 1\)"):
        make_schedule(own, 2, 3)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1", (2, 2, 1), "Did you mean '1f1b'"),
        ("1f1b", (2, 2, 2), "chunks=1, and got 2. Use 'interleaved'"),
        ("interleaved", (2, 2, 1), "chunks >= 2, and got 1"),
        ("zero-bubble", (2, 2, 3), "chunks=1 and chunks=2, and got 3"),
        ("gpipe", (0, 2, 1), "number of stages must be at least 1, and got 0"),
        ("1f1b", (2, 0, 1), "number of micro-batches must be at least 1"),
        ("interleaved", (2, 2, 0), "number of chunks must be at least 1"),
    ],
)
def test_what_is_not_defined_is_said(name: str, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, *sizes)


def test_a_schedule_has_one_order_per_stage_and_two_chunks_in_a_v() -> None:
    own = _two_stages(GOOD, GOOD)
    with pytest.raises(ConfigError, match="3 stages and orders of 2"):
        replace(own, stages=3)
    with pytest.raises(ConfigError, match="each stage has 2 chunks"):
        replace(own, placement=Placement.V)
