"""Pipeline parallelism: layers divided over stages, along the axis ``pp``."""

from __future__ import annotations

from bmt_pipeline.block_list import PipelineTransformerBlockList
from bmt_pipeline.pipeline_model import PipelineModel
from bmt_pipeline.schedules import Placement, Schedule, make_schedule
from bmt_pipeline.train_step import eval_step, train_step

__all__ = [
    "PipelineModel",
    "PipelineTransformerBlockList",
    "Placement",
    "Schedule",
    "eval_step",
    "make_schedule",
    "train_step",
]
