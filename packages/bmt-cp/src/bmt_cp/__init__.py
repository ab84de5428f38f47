"""Context parallelism: one sequence over the ranks along the axis ``cp``."""

from __future__ import annotations

from bmt_cp.attention import Transport, attention
from bmt_cp.hugging_face import register
from bmt_cp.split import IGNORED, Part, gather, split

__all__ = ["IGNORED", "Part", "Transport", "attention", "gather", "split"]

register()
