"""``make_timeline``: the start and end of each action of a schedule on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bmt_pipeline.schedules.check import run_abstractly
from bmt_pipeline.schedules.schedule import Action, Output, Schedule
from bmt_pipeline.schedules.times import Times


class Span(NamedTuple):
    """An action with the times at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of each stage's actions, in order. The step starts at 0."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time of the step, until the last stage has ended."""
        return max(spans[-1].end for spans in self.spans)

    def bubble(self, stage: int) -> float:
        """Return the fraction of the step in which ``stage`` computes nothing."""
        return 1 - self._busy(stage) / self.makespan

    def waiting(self, stage: int) -> float:
        """Return the time in which ``stage`` computes nothing between its own first and
        last action.

        Zero-bubble schedules bring this to 0. The idle time before the first and after the last
        action remains, because the first micro-batch must reach the stage. Without synchronisation
        at the end of a step it overlaps with the next step.
        """
        return self.spans[stage][-1].end - self.spans[stage][0].start - self._busy(stage)

    def _busy(self, stage: int) -> float:
        return sum(span.end - span.start for span in self.spans[stage])


def make_timeline(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Run ``schedule`` on a virtual clock; by default each forward and gradient takes 1 and a
    transfer takes no time.

    An action starts when the stage's previous action has ended and all its inputs have arrived.
    Transfers do not delay computation.
    """
    times = times or Times()
    times.check(schedule.parts)
    made: dict[Output, tuple[int, float]] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    for stage, action in run_abstractly(schedule):
        arrivals = [
            end if source == stage else end + times.transfer
            for source, end in map(made.__getitem__, schedule.inputs_of(stage, action))
        ]
        free = spans[stage][-1].end if spans[stage] else 0.0
        start = max(free, *arrivals, 0.0)
        end = start + times.of(action.kind, schedule.part_of(stage, action.chunk))
        spans[stage].append(Span(action, start, end))
        if output := schedule.output_of(stage, action):
            made[output] = (stage, end)
    return Timeline(schedule=schedule, spans=tuple(map(tuple, spans)))


def ideal_step_time(schedule: Schedule, times: Times) -> float | None:
    """Return the time of a step by the formula in the schedule's paper, which ignores transfers;
    None if there is no formula.

    With f, i, w the times of one part, b = i + w, m micro-batches, s stages and v chunks:

    - gpipe and 1f1b: (m + s - 1) (f + b), Narayanan et al. 2021, section 2.2.1.
    - interleaved, m a multiple of s: (m v + s - 1) (f + b), section 2.2.2.
    - zero-bubble with one chunk, m >= s: m (f + b) + (s - 1) (f + i - w), Qi et al. 2023, table 2.
    - zero-bubble with two chunks, f = i = w, m >= 2 s - 1: 6 m f, and (s - 1) f until the last
      stage begins, Qi et al. 2024.
    """
    f, i, w = times.forward, times.input_gradient, times.weight_gradient
    if isinstance(f, Sequence) or isinstance(i, Sequence) or isinstance(w, Sequence):
        return None
    m, s, v = schedule.micro_batches, schedule.stages, schedule.chunks
    if schedule.name in ("gpipe", "1f1b"):
        return (m + s - 1) * (f + i + w)
    if schedule.name == "interleaved" and m % s == 0:
        return (m * v + s - 1) * (f + i + w)
    if schedule.name == "zero-bubble" and v == 1 and m >= s:
        return m * (f + i + w) + (s - 1) * (f + i - w)
    if schedule.name == "zero-bubble" and v == 2 and m >= 2 * s - 1 and f == i == w:
        return (6 * m + s - 1) * f
    return None
