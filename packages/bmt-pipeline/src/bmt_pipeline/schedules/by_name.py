"""``make_schedule``: built-in schedules by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from bmt_core.errors import ConfigError, unknown_name
from bmt_pipeline.schedules.check import check_schedule
from bmt_pipeline.schedules.gpipe import gpipe
from bmt_pipeline.schedules.interleaved import interleaved
from bmt_pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from bmt_pipeline.schedules.schedule import Schedule
from bmt_pipeline.schedules.zero_bubble import zero_bubble

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(
    schedule: str | Schedule, stages: int, micro_batches: int, chunks: int = 1
) -> Schedule:
    """Return the built-in schedule of this name for these sizes, or check a ``Schedule`` and
    return it.

    Raises :class:`ConfigError` for an unknown name, for sizes that the schedule does not support,
    and for a ``Schedule`` that was made for other sizes or cannot run.

    >>> schedule = make_schedule("1f1b", stages=4, micro_batches=8)
    >>> [(action.kind.value, action.micro_batch) for action in schedule.orders[3][:3]]
    [('F', 0), ('B', 0), ('F', 1)]
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ConfigError(unknown_name("schedule", schedule, SCHEDULES))
        return _made(schedule, stages, micro_batches, chunks)
    made_for = (schedule.stages, schedule.micro_batches, schedule.chunks)
    if made_for != (stages, micro_batches, chunks):
        raise ConfigError(
            f"The schedule {schedule.name!r} is made for (stages, micro-batches, chunks) ="
            f" {made_for}, and the step has {(stages, micro_batches, chunks)}. Make the schedule"
            " for these sizes."
        )
    check_schedule(schedule)
    return schedule


@functools.lru_cache
def _made(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    return SCHEDULES[name](stages, micro_batches, chunks)
