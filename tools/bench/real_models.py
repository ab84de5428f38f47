"""``RealModel``: language models of transformers that people train, by name, with random values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072}
CONFIGURATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama-tiny": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        },
    ),
    "llama3-1b": (
        "llama",
        {
            **LLAMA3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "llama3-8b": (
        "llama",
        {
            **LLAMA3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "sliding_window": None,
        },
    ),
    "qwen3-4b": (
        "qwen3",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": (  # half of the layers, experts and experts per token of the 30 B model
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
}
"""The model type of transformers, and what of its configuration differs from the type's own."""


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """A model, the length of its sequences in tokens, and what of it is trained: everything, or
    adapters of rank ``lora`` on all linear layers but the head, as PEFT makes them.

    ``layers`` is their number; None: as many as the model has.
    """

    name: str
    sequence: int
    layers: int | None = None
    lora: int | None = None

    def configuration(self) -> Any:
        """Return the configuration of transformers."""
        from transformers import AutoConfig

        kind, values = CONFIGURATIONS[self.name]
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return AutoConfig.for_model(kind, **{**values, **layers})

    def on_meta(self, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
        """Return the model on the device "meta", with parameters of ``dtype``, and ``attention`` by
        the name that transformers has for it; adapters are in float32, as PEFT makes them.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                self.configuration(), dtype=dtype, attn_implementation=attention
            )
            if self.lora is not None:
                from peft import LoraConfig, get_peft_model

                adapters = LoraConfig(
                    r=self.lora, lora_alpha=2 * self.lora, target_modules="all-linear"
                )
                model = get_peft_model(model, adapters)
        return model

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self.configuration().vocab_size)

    @property
    def dim_model(self) -> int:
        """The width of the hidden states."""
        return int(self.configuration().hidden_size)

    def num_parameters(self) -> int:
        """Number of elements of all parameters, adapters included."""
        return sum(_numbers(self))

    def flops_per_token(self) -> float:
        """Operations of forward and backward for one token: 6 for each parameter that is trained, 4
        for each that is frozen, and 12 * layers * width of all heads * sequence / 2 for causal
        attention. Recomputation does not count, nor do experts that a token does not use.
        """
        config = self.configuration()
        trained, frozen = _numbers(self)
        unused = 0
        if (experts := getattr(config, "num_experts", 0)) > 0:
            each = 3 * config.hidden_size * config.moe_intermediate_size
            unused = config.num_hidden_layers * (experts - config.num_experts_per_tok) * each
        heads = config.num_attention_heads * config.head_dim
        attention = 12 * config.num_hidden_layers * heads * self.sequence / 2
        if self.lora is None:
            return float(6 * (trained - unused) + attention)
        return float(6 * trained + 4 * (frozen - unused) + attention)


@cache
def _numbers(model: RealModel) -> tuple[int, int]:
    """Return how many elements are trained, and how many are frozen."""
    parameters = list(model.on_meta(torch.bfloat16).parameters())
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return trained, sum(each.numel() for each in parameters) - trained


def causal_lm(model: Any) -> Any:
    """Return the model of transformers, also of one with PEFT's adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
