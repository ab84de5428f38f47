"""``small_causal_lm``: a small causal language model after a Hugging Face ``config.json``."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError

_SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "vocab_size": 68,
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
"""The most that sizes may be, by the names that all configurations of transformers have."""

_LENGTH = 8


def small_causal_lm(directory: str) -> nn.Module:
    """Return the causal language model of ``directory/config.json`` with small sizes, random values
    and without dropout.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(_small_config(directory))
    # Transformers warns of a class that is not called ...ForCausalLM, and takes this one.
    model.loss_type = model.loss_type or "ForCausalLM"
    made: nn.Module = model
    return made


def token_batch(directory: str, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Return ``rows`` rows of random tokens, which are their own labels."""
    tokens = torch.randint(_small_config(directory).vocab_size, (rows, _LENGTH))
    return {"input_ids": tokens, "labels": tokens}


@functools.cache
def _small_config(directory: str) -> Any:
    if find_spec("transformers") is None:
        raise ConfigError(
            "--hf-config needs transformers, which is not installed. Install it with:"
            " pip install transformers"
        )
    from transformers import AutoConfig

    file = Path(directory, "config.json")
    try:
        content = json.loads(file.read_text())
        kind = content.pop("model_type")
        config = AutoConfig.for_model(kind, **content)
    except (OSError, ValueError, KeyError) as error:
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"{file} cannot be read as the configuration of a model of transformers: {message}."
        ) from error
    return AutoConfig.for_model(kind, **content | _changes(config))


def _changes(config: Any) -> dict[str, Any]:
    """Return what makes a model of ``config`` small and deterministic."""
    # Some configurations call a size by a name of their own.
    own_names = config.attribute_map
    changes: dict[str, Any] = {}
    for name, most in _SIZES.items():
        if isinstance(size := getattr(config, name, None), int):
            changes[own_names.get(name, name)] = min(size, most)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int) and groups != config.num_attention_heads:
        changes["num_key_value_heads"] = min(groups, _SIZES["num_attention_heads"] // 2)
    elif isinstance(groups, int):
        changes["num_key_value_heads"] = min(groups, _SIZES["num_attention_heads"])
    if getattr(config, "layer_types", None):
        changes["layer_types"] = config.layer_types[: _SIZES["num_hidden_layers"]]
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            changes[name] = 0.0
        if name.endswith("_token_id") and isinstance(value, int):
            changes[name] = min(value, _SIZES["vocab_size"] - 1)
    return changes
