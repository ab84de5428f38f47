"""Files of the hub that transformers converts are read and written by the stages of a pipeline,
each for its own layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from bmt_checkpoint import load, save
from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import run_ranks
from bmt_zero import BMTrainModelWrapper


def mixtral() -> Any:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, **experts, vocab_size=37, num_hidden_layers=3, pad_token_id=0)
    )


def through_stages(folder: str) -> bool:
    with torch.device("meta"):
        model = mixtral()
    model.model.layers = PipelineTransformerBlockList(model.model.layers)
    BMTrainModelWrapper(model, init=False)
    load(model, f"{folder}/hub")
    save(model, f"{folder}/saved/")
    return any(name.startswith("model.layers.2.") for name, _ in model.named_parameters())


def test_stages_read_and_write_their_layers_of_a_hub_directory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixtral()
    model.save_pretrained(tmp_path / "hub")
    has_last_layer = run_ranks(through_stages, 4, str(tmp_path), init={"pipe_size": 2})
    assert has_last_layer == [False] * 2 + [True] * 2
    expected = load_file(tmp_path / "hub" / "model.safetensors")
    found = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        found |= load_file(path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
