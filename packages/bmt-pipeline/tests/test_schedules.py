"""All schedules: nothing is missing, nothing waits forever, and memory stays within what the
docstrings say.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules import (
    SCHEDULES,
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
from bmt_pipeline.schedules.interleaved import group_size

F, B, G, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = {"interleaved": st.integers(2, 4), "zero-bubble": st.integers(1, 2)}.get(
        name, st.just(1)
    )
    return make_schedule(name, draw(st.integers(1, 8)), draw(st.integers(1, 32)), draw(chunks))


class Stages:
    """Runs stages one action at a time, with a queue per directed edge; it shares no code with
    the checker.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.parts = schedule.stages * schedule.chunks
        self.rest = [deque(order) for order in schedule.orders]
        self.queues: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
        self.has: list[set[tuple[str, int, int]]] = [set() for _ in self.rest]

    def advance(self, stage: int) -> bool:
        """Make the next action of ``stage`` if what it needs has been sent; tell whether it was."""
        action = self.rest[stage][0]
        part = self.schedule.part_of(stage, action.chunk)
        if not all(self._receive(stage, output) for output in self._needed(action, part)):
            return False
        self.rest[stage].popleft()
        if action.kind is F:
            self._send(stage, ("activation", action.micro_batch, part), part + 1)
        elif action.kind is not W:
            self._send(stage, ("gradient", action.micro_batch, part), part - 1)
        return True

    def _needed(self, action: Action, part: int) -> list[tuple[str, int, int]]:
        micro_batch = action.micro_batch
        if action.kind is F:
            return [("activation", micro_batch, part - 1)] if part > 0 else []
        if action.kind is W:
            return [("gradient", micro_batch, part)]
        from_next = [("gradient", micro_batch, part + 1)] if part < self.parts - 1 else []
        return [("activation", micro_batch, part), *from_next]

    def _receive(self, stage: int, output: tuple[str, int, int]) -> bool:
        queue = self.queues[self.schedule.place_of(output[2])[0], stage]
        while output not in self.has[stage] and queue:
            self.has[stage].add(queue.popleft())
        return output in self.has[stage]

    def _send(self, stage: int, output: tuple[str, int, int], to_part: int) -> None:
        self.has[stage].add(output)
        if 0 <= to_part < self.parts and (receiver := self.schedule.place_of(to_part)[0]) != stage:
            self.queues[stage, receiver].append(output)


@settings(max_examples=60)
@given(schedules(), st.randoms(use_true_random=False))
def test_every_schedule_comes_to_its_end_however_fast_stages_and_transfers_are(
    schedule: Schedule, dice: random.Random
) -> None:
    stages = Stages(schedule)
    ready = list(range(schedule.stages))
    while ready:
        stage = dice.choice(ready)
        if stages.advance(stage):
            ready = [stage for stage in range(schedule.stages) if stages.rest[stage]]
        else:
            ready.remove(stage)
    assert not any(stages.rest)
    check_schedule(schedule)


@settings(max_examples=60)
@given(schedules())
def test_every_micro_batch_passes_every_part_once_in_each_direction(schedule: Schedule) -> None:
    each = {(i, chunk) for i in range(schedule.micro_batches) for chunk in range(schedule.chunks)}
    kinds = (F, G, W) if schedule.name == "zero-bubble" else (F, B)
    for order in schedule.orders:
        assert Counter(order) == Counter(Action(kind, *place) for kind in kinds for place in each)


@settings(max_examples=60)
@given(schedules())
def test_activations_are_live_as_the_docstring_says(schedule: Schedule) -> None:
    stages, micro_batches, chunks = schedule.stages, schedule.micro_batches, schedule.chunks
    for stage in range(stages):
        peak = schedule.peak_live(stage)
        assert peak <= micro_batches * chunks
        if schedule.name == "gpipe":
            assert peak == micro_batches
        elif schedule.name == "1f1b":
            assert peak == min(stages - stage, micro_batches)
        elif schedule.name == "interleaved":
            group = group_size(stages, micro_batches)
            assert group <= 1.5 * stages + 0.5
            assert peak <= 2 * (stages - 1 - stage) + (chunks - 1) * group + 1
        else:
            assert peak <= stages * chunks


@settings(max_examples=30)
@given(schedules())
def test_both_ends_of_an_edge_agree_on_what_travels(schedule: Schedule) -> None:
    for stage in range(schedule.stages):
        for source in range(schedule.stages):
            received = schedule.receives(stage, source)
            assert received == schedule.sends(source, stage)
            assert all(schedule.place_of(output.part)[0] == source != stage for output in received)
    sent = sum(
        len(schedule.sends(i, j)) for i in range(schedule.stages) for j in range(schedule.stages)
    )
    borders = sum(
        schedule.place_of(part)[0] != schedule.place_of(part + 1)[0]
        for part in range(schedule.parts - 1)
    )
    assert sent == 2 * borders * schedule.micro_batches


@given(st.integers(1, 8), st.integers(1, 4))
def test_placements_have_each_part_once(stages: int, chunks: int) -> None:
    for placement, count in ((Placement.LOOP, chunks), (Placement.V, 2)):
        for part in range(stages * count):
            stage, chunk = placement.place_of(part, stages)
            assert 0 <= stage < stages and 0 <= chunk < count
            assert placement.part_of(stage, chunk, stages) == part


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
