"""Tensor parallelism: layers of which each rank along the axis ``tp`` computes a part."""

from __future__ import annotations

from bmt_tp.embedding import VPEmbedding
from bmt_tp.linear_function import OpParallelLinear, ReduceType, parallel_linear
from bmt_tp.linear_layers import ColumnParallelLinear, RowParallelLinear
from bmt_tp.plans import (
    Column,
    Head,
    PerPosition,
    Plan,
    Row,
    VocabularyEmbedding,
    Whole,
    parallelize,
    plan_for,
)
from bmt_tp.random_numbers import own_random_numbers
from bmt_tp.tensor_group import allow_equal_rows
from bmt_tp.whole import whole

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Head",
    "OpParallelLinear",
    "PerPosition",
    "Plan",
    "ReduceType",
    "Row",
    "RowParallelLinear",
    "VPEmbedding",
    "VocabularyEmbedding",
    "Whole",
    "allow_equal_rows",
    "own_random_numbers",
    "parallel_linear",
    "parallelize",
    "plan_for",
    "whole",
]
