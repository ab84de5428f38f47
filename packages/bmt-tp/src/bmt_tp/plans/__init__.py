"""Plans: data that says how a plain torch model is cut over the ranks along ``tp``, and ``parallelize``, which does it.

- ``plan``: :class:`Plan`, patterns of module names; ``styles``: what it says about the parameters of a module.
- ``hugging_face``: the plans that are ready.
- ``matching``: what a plan says about each module of a model, and all checks.
- ``parallelize``: changes the model; ``split_layers`` and ``activations`` are the classes that its modules get.
"""

from __future__ import annotations

from bmt_tp.plans.hugging_face import plan_for
from bmt_tp.plans.parallelize import parallelize
from bmt_tp.plans.plan import Plan
from bmt_tp.plans.styles import Column, Head, PerPosition, Row, VocabularyEmbedding, Whole

__all__ = ["Column", "Head", "PerPosition", "Plan", "Row", "VocabularyEmbedding", "Whole", "parallelize", "plan_for"]
