"""Every schedule of a pipeline comes to its end, runs each action once, and keeps as few
activations as its docstring says.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Placement,
    Schedule,
    check_schedule,
    make_schedule,
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
