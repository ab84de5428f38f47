"""Losses that do without a second copy of the logits."""

from bmt_core.loss import _function
from bmt_core.loss.cross_entropy import FusedCrossEntropy

__all__ = ["FusedCrossEntropy", "_function"]
