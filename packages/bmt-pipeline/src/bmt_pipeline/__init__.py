"""Pipeline parallelism: layers divided over stages, along the axis ``pp``."""

from __future__ import annotations

from bmt_pipeline.block_list import PipelineTransformerBlockList
from bmt_pipeline.schedules import Schedule, make_schedule

__all__ = ["PipelineTransformerBlockList", "Schedule", "make_schedule"]
