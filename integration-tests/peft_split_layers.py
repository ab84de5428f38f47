"""What ``test_peft.py`` runs on ranks along ``tp``: adapters on layers that a plan splits, and on
those that it leaves whole.

A module of its own, for the reason that ``peft_models`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plan_models import built, inputs

import bmtrain as bmt
from bmt_tp import parallelize, plan_for

SPLIT = ["q_proj", "down_proj", "lm_head", "embed_tokens"]


def with_adapter(model: Any, target: str) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules=[target], task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(model, config)


def before_the_plan(target: str) -> Any:
    return parallelize(with_adapter(built("llama"), target).get_base_model())


def before_the_wrapper(target: str) -> Any:
    return bmt.BMTrainModelWrapper(with_adapter(parallelize(built("llama")), target))


def before_a_block(target: str) -> Any:
    model = with_adapter(parallelize(built("llama")), target).get_base_model()
    return bmt.Block(model.model.layers[0] if target in ("q_proj", "down_proj") else model)


def after_the_wrapper(target: str) -> Any:
    return with_adapter(bmt.BMTrainModelWrapper(parallelize(built("llama"))), target)


ORDERS: list[Callable[[str], Any]] = [
    before_the_plan,
    before_the_wrapper,
    before_a_block,
    after_the_wrapper,
]


def refusals() -> dict[tuple[str, str], str]:
    """What is said of an adapter on each layer that is split, by when it is added."""
    said = {}
    for order in ORDERS:
        for target in SPLIT:
            with pytest.raises(bmt.ConfigError) as raised:
                order(target)
            said[order.__name__, target] = str(raised.value)
    model: Any = built("llama")
    with pytest.raises(
        bmt.ConfigError, match=r"to lm_head.weight .* Add it before the model is split along 'tp'"
    ):
        bmt.BMTrainModelWrapper(
            with_adapter(parallelize(model, plan_for(model, split_vocabulary=False)), "lm_head")
        )
    with pytest.raises(bmt.ConfigError, match=r"Call parallelize\(model.get_base_model\(\)\)"):
        parallelize(with_adapter(built("llama"), "q_proj"))
    return said


def on_a_whole_layer() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss and the adapter's gradients in plain torch, and on ranks of which each has the
    whole head.
    """
    found = []
    for splits in (False, True):
        model = with_adapter(built("llama"), "lm_head").train()
        if splits:
            inner = model.get_base_model()
            parallelize(inner, plan_for(inner, split_vocabulary=False))
            bmt.BMTrainModelWrapper(model)
        loss = model(**inputs(0)).loss
        loss.backward()
        grads = {
            name: p.gather_like(p.grad) if splits else p.grad
            for name, p in model.named_parameters()
            if "lora" in name
        }
        found.append({"loss": loss.detach(), **grads})
    return found[0], found[1]


def run_all() -> Any:
    return refusals(), on_a_whole_layer()
