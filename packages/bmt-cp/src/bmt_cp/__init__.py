"""Context parallelism: one sequence over the ranks along the axis ``cp``."""

from __future__ import annotations

from bmt_cp.batch_parts import IGNORED, Part, gather, split
from bmt_cp.context_attention import attention
from bmt_cp.hugging_face import register

__all__ = ["IGNORED", "Part", "attention", "gather", "split"]

register()
