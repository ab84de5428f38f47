"""Schedules of a pipeline's step as data, with their checks and a virtual clock."""

from __future__ import annotations

from bmt_pipeline.schedules.by_name import SCHEDULES, make_schedule
from bmt_pipeline.schedules.check import check_schedule
from bmt_pipeline.schedules.schedule import Action, Content, Kind, Output, Placement, Schedule
from bmt_pipeline.schedules.timeline import Timeline, ideal_step_time, make_timeline
from bmt_pipeline.schedules.times import Times
from bmt_pipeline.schedules.zero_bubble import zero_bubble

__all__ = [
    "Action",
    "Content",
    "Kind",
    "Output",
    "Placement",
    "SCHEDULES",
    "Schedule",
    "Timeline",
    "Times",
    "check_schedule",
    "ideal_step_time",
    "make_schedule",
    "make_timeline",
    "zero_bubble",
]
