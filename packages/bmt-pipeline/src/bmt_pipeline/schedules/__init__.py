"""Schedules of a pipeline's step as data, with their checks and a virtual clock."""

from __future__ import annotations

from bmt_pipeline.schedules.by_name import SCHEDULES, make_schedule
from bmt_pipeline.schedules.check import check_schedule
from bmt_pipeline.schedules.schedule import Action, Content, Kind, Output, Placement, Schedule

__all__ = [
    "Action",
    "Content",
    "Kind",
    "Output",
    "Placement",
    "SCHEDULES",
    "Schedule",
    "check_schedule",
    "make_schedule",
]
