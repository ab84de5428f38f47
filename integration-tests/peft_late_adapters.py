"""What ``test_peft.py`` runs on ranks: adapters of several kinds that are made after wrapping,
combined, saved by ``bmt.save`` and loaded; learning rates by ``ndim``; and what is refused.

A module of its own, for the reason that ``peft_models`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import built, inputs
from peft import (
    AdaLoraConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
)
from peft.optimizers import create_loraplus_optimizer

import bmtrain as bmt

LAYERS = {"target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
KINDS: dict[str, Callable[[], Any]] = {
    # Their first values depend on the weight, which some of them change.
    "DoRA": lambda: LoraConfig(r=2, use_dora=True, init_lora_weights=False, **LAYERS),
    "PiSSA": lambda: LoraConfig(r=2, init_lora_weights="pissa", **LAYERS),
    "OLoRA": lambda: LoraConfig(r=2, init_lora_weights="olora", **LAYERS),
    # Their sizes do.
    "LoHa": lambda: LoHaConfig(r=2, init_weights=False, **LAYERS),
    "LoKr": lambda: LoKrConfig(r=2, init_weights=False, **LAYERS),
    "OFT": lambda: OFTConfig(r=0, oft_block_size=4, **LAYERS),
}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "init_lora_weights": False, **LAYERS, **options})


def adapted(config: Any, wraps: bool, name: str = "llama") -> Any:
    model = built(name)
    torch.manual_seed(1)
    return get_peft_model(bmt.BMTrainModelWrapper(model) if wraps else model, config)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**inputs(9, 0, 1)).logits
    return found


def train(model: Any, optimizer: Any, wraps: bool) -> None:
    manager = bmt.optim.OptimManager()
    if wraps:
        manager.add_optimizer(optimizer)
    for step in range(2):
        parts = [bmt.rank()] if wraps else range(2)
        loss = torch.stack([model(**inputs(step, part, 2)).loss for part in parts]).mean()
        if wraps:
            manager.backward(loss)
            manager.step()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def trained(model: Any, wraps: bool) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3), wraps)
    return logits(model)


def by_kind(wraps: bool) -> dict[str, list[torch.Tensor]]:
    """Logits before and after training, of adapters of each kind."""
    found = {}
    for name, config in KINDS.items():
        model = adapted(config(), wraps)
        found[name] = [logits(model), trained(model, wraps)]
    return found


def combined(wraps: bool) -> dict[str, torch.Tensor]:
    """Logits with several adapters in one."""
    model = adapted(lora(), wraps)
    model.add_adapter("other", lora())
    logits(model)
    found = {}
    for kind in ("linear", "cat", "svd"):
        model.add_weighted_adapter(["default", "other"], [0.7, 0.4], kind, combination_type=kind)
        model.set_adapter(kind)
        found[kind] = logits(model)
    return found


def by_rates(wraps: bool) -> list[Any]:
    """LoRA+, by PEFT's function: its groups, and what was trained."""
    model = adapted(lora(init_lora_weights=True), wraps)
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, eps=1e-3
    )
    groups = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
    train(model, optimizer, wraps)
    return [groups, logits(model)]


def by_rates_of_parts() -> list[Any]:
    """The same, of a model that was called before, in which all adapters are parts."""
    model: Any = built("llama")
    torch.manual_seed(1)
    model = bmt.BMTrainModelWrapper(get_peft_model(model, lora(init_lora_weights=True)))
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, eps=1e-3
    )
    groups = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
    train(model, optimizer, True)
    return [groups, logits(model)]


def saved(directory: str) -> list[torch.Tensor]:
    """Logits of the model that was saved, in plain PEFT, and after loading into another one."""
    config = lora(modules_to_save=["lm_head"])
    model = adapted(config, True)
    model.add_adapter("other", lora())
    expected = trained(model, True)
    bmt.save(model, f"{directory}/adapters/")
    plain = PeftModel.from_pretrained(built("llama"), f"{directory}/adapters")
    again = adapted(config, True)
    again.add_adapter("other", lora())
    before = logits(again)
    assert not torch.equal(before, expected)
    bmt.load(again, f"{directory}/adapters")
    state = {name: value for name, value in again.state_dict().items() if "lora" in name}
    for name, value in model.state_dict().items():
        if "lora" in name:
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    files = {str(path.relative_to(directory)) for path in Path(directory).rglob("*.safetensors")}
    assert files == {f"adapters/{name}adapter_model.safetensors" for name in ("", "other/")}
    other = adapted(lora(target_modules=["q_proj"]), True)
    before = logits(other)
    with pytest.raises(bmt.CheckpointError, match=r"lm_head\.weight is not in the model, and 4"):
        bmt.load(other, f"{directory}/adapters")
    wide = adapted(LoraConfig(r=3, **LAYERS, modules_to_save=["lm_head"]), True)
    with pytest.raises(bmt.CheckpointError, match=r"shape \(2, 16\) in the file and \(3, 16\) in"):
        bmt.load(wide, f"{directory}/adapters", strict=False)
    found = bmt.load(other, f"{directory}/adapters", strict=False)
    assert found.missing_keys == [] and len(found.unexpected_keys) == 5
    assert not torch.equal(logits(other), before)
    return [expected, logits(plain.eval()), logits(again)]


def refused() -> list[str]:
    """What is said of adapters that a sharded model cannot have, in both orders."""

    def of_parameter(wraps: bool) -> Any:
        experts = lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
        return adapted(experts, wraps, "mixtral")

    def adalora(wraps: bool) -> Any:
        return adapted(AdaLoraConfig(total_step=9, **LAYERS), wraps)

    def quantized(wraps: bool) -> Any:
        model: Any = built("llama")
        model.quantization_method = "bitsandbytes"
        return model if wraps else get_peft_model(model, lora())

    said = []
    for make in (of_parameter, adalora, quantized):
        for wraps in (True, False):
            with pytest.raises(bmt.ConfigError) as caught:
                bmt.BMTrainModelWrapper(make(wraps))
            said.append(str(caught.value))
        logits(adapted(lora(), False))  # plain models are left alone
    for make in (of_parameter, adalora):
        logits(make(False))
    return said


def run_all(directory: str) -> Any:
    Path(directory).mkdir(exist_ok=True)
    # In a run, whose checks see plain models, too.
    pairs = [(f(False), f(True)) for f in (by_kind, combined, by_rates)]
    return pairs, by_rates_of_parts(), saved(directory), refused()
