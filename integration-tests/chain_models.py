"""A small language model that can be sharded, split along ``tp`` and divided along ``pp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bmt_tp import Column, Plan, Row, Whole, parallelize

WORDS, WIDTH = 14, 6


class Layer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Chain(nn.Module):
    """Returns the loss of ids (batch, length). ``sizes``: features inside of each layer."""

    def __init__(self, sizes: Sequence[int] = (8, 4, 12, 4)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*[Layer(inner) for inner in sizes])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(self.embedding(ids[:, :-1])), ids[:, 1:])

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits, targets.flatten(), **options)


def split(model: nn.Module) -> nn.Module:
    """Split the layers over the ranks along ``tp``."""
    parameters: Any = {
        "embedding": Whole(),
        "layers.*.up": Column(gather="sequence_first"),
        "layers.*.down": Row(input="sequence_first"),
        "head": Whole(),
    }
    return parallelize(model, Plan(parameters=parameters, layers="layers.*", last="norm"))


def batch(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (8, 7), generator=torch.Generator().manual_seed(seed))
