"""Layers of BMTrain's ``nn`` that need no tensor parallelism."""

from __future__ import annotations

from bmt_core.nn.linear import Linear, OpLinear

__all__ = ["Linear", "OpLinear"]
