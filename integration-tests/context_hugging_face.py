"""Small models of Hugging Face whose sequences are divided over ranks, and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

import bmt_cp

WORDS = 32
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(num_key_value_heads=1, **SHAPE),
    "qwen3": Qwen3Config(num_key_value_heads=2, **SHAPE),
    "mistral": MistralConfig(num_key_value_heads=2, sliding_window=5, **SHAPE),
    "gemma3": Gemma3TextConfig(num_key_value_heads=4, sliding_window=4, **SHAPE),
}


def model_of(kind: str, attention: str) -> nn.Module:
    """A new model that computes its attention so."""
    config = CONFIGS[kind].__class__.from_dict(CONFIGS[kind].to_dict())
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


class Divided(nn.Module):
    """Returns the sum of the losses of this rank's tokens, and their number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = model_of(kind, "bmt_cp")

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor | None = None
    ) -> Any:
        part = bmt_cp.split(input_ids=ids, labels=labels, document_ids=document_ids)
        return self.model(**part).loss, part.count


def batch(packed: bool, seed: int) -> tuple[torch.Tensor, ...]:
    """Four sequences of 23 tokens, some without a label; packed ones have documents."""
    ids = torch.randint(WORDS, (4, 23))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    return (
        (ids, labels, (torch.rand(ids.shape) < 0.2).long().cumsum(1)) if packed else (ids, labels)
    )
