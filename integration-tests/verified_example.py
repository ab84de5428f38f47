"""The example's GPT for ``bmt verify``: beside it, the same GPT in plain torch.

PYTHONPATH=examples/gpt:integration-tests bmt verify verified_example:PlainGPT \\
    --loss next_token_loss --parallelize as_example
"""

from __future__ import annotations

from typing import Any

import torch
from test_example_model import SIZES, PlainGPT
from torch import nn

from models import GPT

__all__ = ["PlainGPT"]


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Return eight sequences without padding."""
    tokens = torch.randint(SIZES["vocab_size"], (8, SIZES["max_distance"]))
    pos = torch.arange(SIZES["max_distance"]).expand(8, -1)
    return tokens, pos, torch.ones_like(tokens, dtype=torch.bool)


def next_token_loss(logits: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the cross entropy of each token after the first."""
    targets = batch[0][:, 1:]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def as_example(plain: Any) -> nn.Module:
    """Return the example's GPT with the values of ``plain``."""
    made = GPT(**SIZES, dtype=plain.layernorm.weight.dtype)
    made.load_state_dict(plain.state_dict())
    return made
