"""Models that ``bmt verify`` is given by its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bmt_core

TOKENS, WIDTH = 8, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.layers(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class ModelWithDropout(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + nn.functional.dropout(self.head.weight).sum()


class ModelThatFails(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise KeyError("nothing of that name")


number = 3


def batch(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (4, 5))


def three_rows(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (3, 5))


def enlarge_gradients_of_the_head(model: Any) -> nn.Module:
    """A mistake that several ranks make."""
    if bmt_core.world_size() > 1:
        model.head.weight.register_hook(lambda grad: grad * 1.5)
    return model
