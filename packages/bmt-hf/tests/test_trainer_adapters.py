"""Models of PEFT: trained as by the plain Trainer; their checkpoints have the adapters, without the
frozen model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from trainer_runs import (
    RUN,
    accelerate_forgets,
    assert_same_training,
    bmt_trainer,
    model_of,
    trained,
    trained_plainly,
)

from bmt_testing import run_ranks

OPTIONS = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
}


def adapted() -> Any:
    model = model_of()
    torch.manual_seed(4)
    lora = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False
    )
    return get_peft_model(model, lora)


def trained_and_resumed(folder: str) -> list[dict[str, Any]]:
    with accelerate_forgets():
        options = {**OPTIONS, "model": adapted}
        return [
            trained(bmt_trainer(folder, options)),
            trained(bmt_trainer(folder + "-other", options), f"{folder}/checkpoint-2"),
        ]


def test_lora_trains_saves_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "bmt"
    expected = trained_plainly(tmp_path / "plain", 2, {**OPTIONS, "model": adapted})
    for found, resumed in run_ranks(trained_and_resumed, 2, str(folder), init=RUN):
        assert_same_training(found, expected)
        assert all(
            torch.equal(value, found["state"][name]) for name, value in resumed["state"].items()
        )
        loaded = PeftModel.from_pretrained(model_of(), folder / "checkpoint-4")
        for name, value in loaded.named_parameters():
            torch.testing.assert_close(value.detach(), found["state"][name], rtol=0, atol=0)
    files = {path.name for path in (folder / "checkpoint-4").iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "training",
        "trainer_state.json",
    } <= files
    assert not any(name.startswith("model") for name in files)
    own, plain = (
        stored(tmp_path / name / "checkpoint-4" / "adapter_model.safetensors")
        for name in ("bmt", "plain")
    )
    # PEFT saves it, because lm_head is adapted.
    assert "base_model.model.lm_head.base_layer.weight" in plain
    torch.testing.assert_close(own, plain, rtol=1e-4, atol=2e-6)
    training = [
        stored(file)
        for file in (folder / "checkpoint-4" / "training" / "model").glob("*.safetensors")
    ]
    assert sum(map(len, training)) == len(plain)


def stored(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
