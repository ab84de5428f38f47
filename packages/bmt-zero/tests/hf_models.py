"""Tiny Hugging Face models made from their configurations, and how they are trained in plain torch
and on ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from zero_models import full_gradient

from bmt_core.run import runtime
from bmt_zero import Block, BMTrainModelWrapper

SAMPLES, LENGTH, WORDS = 4, 8, 37
_TOKENS = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(**_TOKENS, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(**_TOKENS, **_SIZES, num_attention_heads=4, num_key_value_heads=2)
    )


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**_TOKENS, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(
        MixtralConfig(**_TOKENS, **_SIZES, **experts, num_attention_heads=2, num_key_value_heads=1)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "mixtral": mixtral,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def initialized_by_hugging_face(name: str) -> Any:
    """The model with the values that its own ``initialize_weights()`` draws; tied weights are drawn
    apart, then tied.
    """
    model: Any = MODELS[name]()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for path in model.all_tied_weights_keys:
        holder, _, key = path.rpartition(".")
        setattr(
            model.get_submodule(holder),
            key,
            nn.Parameter(torch.empty_like(model.get_parameter(path))),
        )
    torch.manual_seed(0)
    model.initialize_weights()
    model.tie_weights()
    return model


def inputs(step: int, part: int, parts: int) -> dict[str, torch.Tensor]:
    """Part of a padded batch; every part has another number of words that count."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(2, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 1, 2)):
        mask[row, LENGTH - padding :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.chunk(parts)[part].to(_device()) for key, value in batch.items()}


def _device() -> torch.device:
    return runtime.current().device if runtime.is_initialized() else torch.device("cpu")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: some gradients are zero but for rounding, and must not be blown up to full steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(model: nn.Module, parts: Sequence[int], of: int, steps: int = 3) -> dict[str, Any]:
    """Train on ``parts`` of the batches cut into ``of``; the loss is the mean of the
    parts' losses.
    """
    optimizer = adam(model)
    model.train()
    losses: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        outputs = [model(**inputs(step, part, of)) for part in parts]
        for output in outputs:
            (output.loss / of).backward()
        losses.append(sum(output.loss.detach().cpu() / of for output in outputs))  # type: ignore[arg-type]
        grads = {name: full_gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return {"loss": torch.stack(losses), "grad": grads, "state": state}


def plain(name: str, of: int, *, on_meta: bool) -> dict[str, Any]:
    model = initialized_by_hugging_face(name) if on_meta else built(name)
    return train(model, range(of), of)


def wrapped(name: str, levels: Sequence[int], use_checkpoint: bool, on_meta: bool) -> nn.Module:
    """The model, its blocks made by the wrapper; or by hand before, where one is of level 0, which
    cannot be set later.
    """
    if on_meta:
        with torch.device("meta"):
            model = MODELS[name]()
        torch.manual_seed(0)
    else:
        model = built(name)
    if 0 in levels:
        layers = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        for index, layer in enumerate(layers):
            Block(layer, use_checkpoint, levels[index % len(levels)])
    BMTrainModelWrapper(model)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for index, block in enumerate(blocks):
        block._zero_level, block._use_checkpoint = levels[index % len(levels)], use_checkpoint
    return model
