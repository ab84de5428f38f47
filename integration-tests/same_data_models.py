"""Models of which ranks along ``tp`` compute parts, and plain modules around them,
for test_same_data.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bmt_tp import (
    Column,
    ColumnParallelLinear,
    Head,
    Plan,
    Row,
    RowParallelLinear,
    VocabularyEmbedding,
)

BATCH, SEQUENCE, WORDS, FEATURES, STEPS, MAX_NORM = 4, 8, 12, 8, 3, 0.5


class Layer(nn.Module):
    """A feed-forward layer, which may form a loss on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES)
        self.aux: torch.Tensor | float = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        self.aux = y.square().mean()
        return x + y


class Model(nn.Module):
    """An embedding, two layers, a norm, a head for words, and one for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the normed hidden states (batch, sequence, features)."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), labels.flatten())


PLAN = Plan(
    parameters={
        "embed": VocabularyEmbedding(),
        "layers.*.up": Column(gather="sequence_first"),
        "layers.*.down": Row(input="sequence_first"),
        "head": Head(),
    },
    layers="layers.*",
    last="norm",
)


class WithValue(nn.Module):
    """``model`` with a head for a value, which every rank computes whole."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 1)
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of the value."""
        value: torch.Tensor = self.value(self.model.hidden(ids)).squeeze(-1)
        return (value - labels / WORDS).square().mean()


class Classic(nn.Module):
    """Megatron's form: whole activations between the layers, of which each rank computes
    some features.
    """

    def __init__(self, *, is_parallel: bool, gathers: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        if is_parallel and gathers:
            self.up: nn.Module = ColumnParallelLinear(FEATURES, 4 * FEATURES)
            self.down: nn.Module = RowParallelLinear(4 * FEATURES, FEATURES)
        elif is_parallel:
            self.up = ColumnParallelLinear(FEATURES, 4 * FEATURES, gather_input=False)
            self.down = RowParallelLinear(4 * FEATURES, FEATURES, all_reduce_output=True)
        else:
            self.up = nn.Linear(FEATURES, 4 * FEATURES)
            self.down = nn.Linear(4 * FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def plain(kind: Callable[[], nn.Module]) -> Any:
    """A model with the same values in every process."""
    torch.manual_seed(0)
    return kind()


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Part of the ids and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (2, BATCH, SEQUENCE), generator=generator)
    return ids[0].chunk(parts)[part], ids[1].chunk(parts)[part]


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    loss: torch.Tensor = model(*batch(step, part, parts))
    return loss
