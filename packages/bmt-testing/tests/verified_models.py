"""Models that are compared with one process by ``bmt verify`` and ``assert_matches_single``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bmt_core

TOKENS, WIDTH = 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 6)
        self.down = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(self.dropout(hidden)))
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
