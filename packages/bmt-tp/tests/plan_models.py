"""Tiny Hugging Face models made from their configurations, for the tests of plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS, LENGTH = 40, 8
_TOKENS = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    """Transposed weights, one matrix for queries, keys and values, learned positions, a
    tied head.
    """
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**{**_TOKENS, **sizes, **drops, **options}))


def llama(**options: Any) -> nn.Module:
    """Fewer heads for keys and values than for queries, a padding token, a head of its own."""
    return LlamaForCausalLM(
        LlamaConfig(**{**_TOKENS, **_SIZES, **_HEADS, "pad_token_id": 25, **options})
    )


def qwen2(**options: Any) -> nn.Module:
    """Biases of queries, keys and values, a tied head."""
    return Qwen2ForCausalLM(
        Qwen2Config(**{**_TOKENS, **_SIZES, **_HEADS, "tie_word_embeddings": True, **options})
    )


def qwen3(**options: Any) -> nn.Module:
    """Norms of each head, and heads whose features are not those of the hidden states."""
    return Qwen3ForCausalLM(
        Qwen3Config(**{**_TOKENS, **_SIZES, **_HEADS, "head_dim": 6, **options})
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def built(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model with values in float64, none of them zero or one."""
    torch.manual_seed(seed)
    model = MODELS[name](**options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def inputs(step: int, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    """Part of a batch of four sequences, with every id that a model treats in its own way, and two
    padded sequences.
    """
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, WORDS, (4, LENGTH), generator=generator)
    ids[:, 2] = 25
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 3 :] = mask[2, LENGTH - 1 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return {key: value.chunk(parts)[part] for key, value in batch.items()}
