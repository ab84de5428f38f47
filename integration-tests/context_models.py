"""A language model whose attention goes through ``bmt_cp.attention``, and its batches. In one
process it is a model of plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bmt_cp
from bmt_tp import Column, Head, Plan, Row, VocabularyEmbedding, Whole, parallelize

WORDS, WIDTH, SIZE = 18, 16, 4
TARGETS = {True: "shift_labels", False: "labels"}


@dataclass(frozen=True)
class Kind:
    """What the attention of a model is, and the length of its sequences."""

    length: int = 24
    key_heads: int = 4
    causal: bool = True
    window: int | None = None
    has_documents: bool = False


KINDS = {
    "causal": Kind(),
    "odd length": Kind(length=21, key_heads=1),
    "full": Kind(causal=False),
    "window": Kind(window=5, key_heads=2),
    "documents": Kind(length=22, has_documents=True),
}


class Layer(nn.Module):
    """Attention of 4 heads, and two linear layers."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, kind.key_heads * SIZE)
        self.value = nn.Linear(WIDTH, kind.key_heads * SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = bmt_cp.attention(
            query,
            key,
            value,
            causal=self.kind.causal,
            window=self.kind.window,
            document_ids=document_ids,
        )
        x = x + self.out(found.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(x)
        return result


class Model(nn.Module):
    """Returns the sum of the losses of its tokens and their number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = KINDS[kind]
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.Sequential(Layer(self.kind), Layer(self.kind), Layer(self.kind))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor | None = None
    ) -> Any:
        part = bmt_cp.split(
            input_ids=ids, labels=labels, document_ids=document_ids, causal=self.kind.causal
        )
        x = self.words(part["input_ids"]) + self.places(part["position_ids"])
        documents = part.get("document_ids")
        if documents is None:
            x = self.layers(x)
        else:
            for layer in self.layers:
                x = layer(x, documents)
        logits, targets = (
            self.head(self.norm(x)).flatten(0, 1),
            part[TARGETS[self.kind.causal]].flatten(),
        )
        loss = F.cross_entropy(logits, targets, ignore_index=bmt_cp.IGNORED, reduction="sum")
        return loss, part.count


def split_along_tp(model: nn.Module) -> nn.Module:
    """Split heads and features over the ranks along ``tp``."""
    column, row = Column(gather="batch_first"), Row(input="batch_first")
    plan = Plan(
        parameters={
            "words": VocabularyEmbedding(),
            "places": Whole(),
            **{f"layers.*.{name}": column for name in ("query", "key", "value", "mlp.0")},
            **{f"layers.*.{name}": row for name in ("out", "mlp.2")},
            "head": Head(),
        },
        layers="layers.*",
        last="norm",
    )
    return parallelize(model, plan)


def batch(kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Eight sequences; the ranks' numbers of labels differ."""
    chosen = KINDS[kind]
    ids = torch.randint(WORDS, (8, chosen.length))
    labels = ids.masked_fill(torch.rand(ids.shape) < torch.arange(1, 9)[:, None] / 10, -100)
    if not chosen.has_documents:
        return ids, labels
    begins = torch.rand(ids.shape) < 0.2
    return ids, labels, begins.long().cumsum(1)
