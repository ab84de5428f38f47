"""The virtual clock, against the formulas of the papers and small cases by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules import Times, ideal_step_time, make_schedule, make_timeline
from bmt_pipeline.schedules.schedule import Kind

SIZES = st.integers(1, 8), st.integers(1, 32)


@settings(max_examples=60)
@given(*SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_gpipe_1f1b_and_interleaved_take_the_time_of_their_formulas(
    stages: int, micro_batches: int, f: int, i: int, w: int
) -> None:
    times = Times(forward=f, input_gradient=i, weight_gradient=w)
    cases = [("gpipe", micro_batches, 1), ("1f1b", micro_batches, 1)]
    cases += [("interleaved", -(-micro_batches // stages) * stages, chunks) for chunks in (2, 3)]
    for name, count, chunks in cases:
        schedule = make_schedule(name, stages, count, chunks)
        assert make_timeline(schedule, times).makespan == ideal_step_time(schedule, times)


def test_forwards_in_advance_hide_the_transfers_of_the_interleaved_schedule() -> None:
    few, many = (make_schedule("interleaved", 4, micro_batches, 2) for micro_batches in (8, 32))
    assert list(map(many.peak_live, range(4))) == [11, 9, 7, 5]
    lost = [
        make_timeline(each, Times(transfer=0.5)).makespan - make_timeline(each).makespan
        for each in (few, many)
    ]
    # Of the first micro-batch down and the last one back, however many there are in between.
    assert lost == [7, 7]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_zero_bubble_takes_the_time_of_its_formulas(stages: int) -> None:
    for times in (Times(), Times(forward=3, input_gradient=4, weight_gradient=2)):
        for micro_batches in (stages, stages + 1, 2 * stages, 24):
            schedule = make_schedule("zero-bubble", stages, micro_batches)
            assert make_timeline(schedule, times).makespan == ideal_step_time(schedule, times)
    for micro_batches in (2 * stages - 1, 2 * stages, 24):
        schedule = make_schedule("zero-bubble", stages, micro_batches, 2)
        timeline = make_timeline(schedule)
        assert timeline.makespan == ideal_step_time(schedule, Times())
        assert [timeline.waiting(stage) for stage in range(stages)] == [0] * stages


@settings(max_examples=25)
@given(*SIZES)
def test_zero_bubble_is_never_slower_than_1f1b(stages: int, micro_batches: int) -> None:
    slowest = make_timeline(make_schedule("1f1b", stages, micro_batches)).makespan
    down, back = (
        make_timeline(make_schedule("zero-bubble", stages, micro_batches, chunks))
        for chunks in (1, 2)
    )
    assert down.makespan <= slowest
    assert back.makespan / 2 <= slowest


def test_there_is_no_formula_where_parts_differ_or_the_paper_has_none() -> None:
    assert ideal_step_time(make_schedule("gpipe", 2, 2), Times(forward=[1, 2])) is None
    assert ideal_step_time(make_schedule("interleaved", 4, 5, 2), Times()) is None
    assert ideal_step_time(make_schedule("zero-bubble", 4, 3), Times()) is None


def test_transfers_and_times_per_part_move_what_depends_on_them() -> None:
    times = Times(forward=[1, 2], input_gradient=[1, 3], weight_gradient=1, transfer=0.5)
    timeline = make_timeline(make_schedule("1f1b", 2, 1), times)
    assert [
        [(span.action.kind, span.start, span.end) for span in spans] for spans in timeline.spans
    ] == [
        [(Kind.FORWARD, 0, 1), (Kind.BACKWARD, 8, 10)],
        [(Kind.FORWARD, 1.5, 3.5), (Kind.BACKWARD, 3.5, 7.5)],
    ]
    assert timeline.makespan == 10
    assert (timeline.bubble(0), timeline.waiting(0)) == (pytest.approx(0.7), 7)
    assert (timeline.bubble(1), timeline.waiting(1)) == (pytest.approx(0.4), 0)


def test_nothing_travels_within_a_stage() -> None:
    slow = make_timeline(make_schedule("zero-bubble", 1, 3, 2), Times(transfer=100))
    assert slow.makespan == 18


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (Times(forward=[1, 2, 3]), "2 parts, and there are 3 times of a forward"),
        (Times(weight_gradient=0), "weight gradient must be above 0, and got 0"),
        (Times(transfer=-1), "transfer must be 0 or more, and got -1"),
    ],
)
def test_times_that_do_not_fit_are_refused(times: Times, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_timeline(make_schedule("gpipe", 2, 2), times)
