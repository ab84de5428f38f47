"""Plans, which describe how a plain torch model is split over the ranks along ``tp``, and
``parallelize``, which splits it.

- ``plan``: :class:`Plan` maps patterns of module names to styles; ``styles``: how the parameters of
  one module are split.
- ``hugging_face``: plans for Hugging Face's models.
- ``matching``: applies the patterns of a plan to a model, and checks everything.
- ``parallelize``: changes the model. ``split_layers`` and ``activations`` have the classes that are
  put in front of its modules'.
"""

from __future__ import annotations

from bmt_tp.plans.hugging_face import plan_for
from bmt_tp.plans.parallelize import parallelize
from bmt_tp.plans.plan import Plan
from bmt_tp.plans.styles import Column, Head, PerPosition, Row, VocabularyEmbedding, Whole

__all__ = [
    "Column",
    "Head",
    "PerPosition",
    "Plan",
    "Row",
    "VocabularyEmbedding",
    "Whole",
    "parallelize",
    "plan_for",
]
