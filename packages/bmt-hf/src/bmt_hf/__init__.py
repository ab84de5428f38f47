"""Hugging Face's Trainer on bmt: callbacks, logging, evaluation and arguments are transformers',
the sharded training is bmt's.
"""

from bmt_hf.arguments import TrainingArguments
from bmt_hf.linear_cross_entropy import use_linear_cross_entropy
from bmt_hf.trainer import Trainer

__all__ = [
    "Trainer",
    "TrainingArguments",
    "use_linear_cross_entropy",
]
