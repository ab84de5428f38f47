"""Files of Hugging Face's hub whose names transformers converts are loaded into sharded models, and
written from them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "transformers",
    minversion="5.23",
    reason="older versions of transformers lack some of these models",
)

import torch
from hf_models import WORDS, built, llama
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    GPT2TokenizerFast,
    GteConfig,
    GteModel,
    MixtralConfig,
    MixtralForCausalLM,
    Molmo2TextConfig,
    Molmo2TextModel,
    OlmoeConfig,
    OlmoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from bmt_checkpoint import hub_names, load, load_checkpoint, save, save_checkpoint, wait_for_saves
from bmt_core import CheckpointError, rank, synchronize
from bmt_testing import on_ranks, run_ranks
from bmt_zero import BMTrainModelWrapper

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_WORDS = {
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_key_value_heads": 1,
}


def mixtral(**changes: Any) -> Any:
    # More than ten experts: 10 follows 9, not 1.
    return MixtralForCausalLM(
        MixtralConfig(**_WORDS, **_SIZES, num_local_experts=12, num_experts_per_tok=2, **changes)
    )


def olmoe() -> Any:
    return OlmoeForCausalLM(OlmoeConfig(**_WORDS, **_SIZES, num_experts=4, num_experts_per_tok=2))


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**_SIZES, image_size=8, patch_size=4))


def gte() -> Any:
    return GteModel(GteConfig(**_SIZES, vocab_size=WORDS, pad_token_id=0))


def molmo2() -> Any:
    # Queries, keys and values of different sizes are one tensor of the file, and two of the file
    # are the embedding.
    return Molmo2TextModel(
        Molmo2TextConfig(**_WORDS, **_SIZES, head_dim=8, additional_vocab_size=0)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": mixtral,
    "mixtral, tied": lambda: mixtral(tie_word_embeddings=True),
    "olmoe": olmoe,
    "vit": vit,
    "gte": gte,
    "molmo2": molmo2,
    "llama": llama,  # of which no name is converted
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        model = MODELS[name]()
    return BMTrainModelWrapper(model, init=False)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert not found.keys() & set(file.keys())
            # It is no mapping.
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def through_ranks(name: str, folder: str, non_blocking: bool) -> dict[str, torch.Tensor]:
    model = on_meta(name)
    load(model, f"{folder}/hub")
    save(model, f"{folder}/saved/", non_blocking)
    wait_for_saves()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "run"), [*zip(MODELS, itertools.cycle([(2, False), (1, False), (4, True)]))]
)
def test_a_hub_directory_fills_a_sharded_model_and_is_written_again(
    name: str, run: tuple[int, bool], tmp_path: Path
) -> None:
    (world_size, non_blocking), model = run, made(name)
    model.save_pretrained(tmp_path / "hub")
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    is_converted = not tensors_in(hub).keys() <= model.state_dict().keys()
    assert is_converted == (name != "llama")  # or else nothing is tested
    for state in run_ranks(through_ranks, world_size, name, str(tmp_path), non_blocking):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(tensors_in(saved), tensors_in(hub), rtol=0, atol=0)
    for path in hub.glob("*.json"):
        assert json.loads((saved / path.name).read_text()) == json.loads(path.read_text())
    loaded, info = type(model).from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def saved_from_scratch(name: str, folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = GPT2TokenizerFast(vocab={"a": 0, "b": 1}, merges=[])
    save(BMTrainModelWrapper(MODELS[name]()), f"{folder}/saved/", tokenizer=tokenizer)


def test_a_model_of_our_own_is_saved_as_transformers_saves_it_with_its_tokenizer(
    tmp_path: Path,
) -> None:
    model = made("mixtral")
    model.save_pretrained(tmp_path / "hub")
    run_ranks(saved_from_scratch, 2, "mixtral", str(tmp_path))
    torch.testing.assert_close(
        tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "hub"), rtol=0, atol=0
    )
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    assert GPT2TokenizerFast.from_pretrained(tmp_path / "saved").convert_tokens_to_ids(["b"]) == [1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@on_ranks(2)
def test_a_file_of_the_model_without_its_head_and_with_old_buffers_fits(tmp_path: Path) -> None:
    plain: Any = built("gpt2")
    if rank() == 0:
        base = GPT2Model(GPT2Config(**plain.config.to_diff_dict()))
        base.load_state_dict(plain.transformer.state_dict())
        old = {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
        torch.save({**base.state_dict(), **old}, tmp_path / "pytorch_model.bin")
    synchronize()
    with torch.device("meta"):
        model = built("gpt2")
    BMTrainModelWrapper(model, init=False)
    load(model, str(tmp_path))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@on_ranks(2)
def test_a_missing_expert_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    if rank() == 0:
        made("mixtral").save_pretrained(tmp_path / "hub")
        tensors = tensors_in(tmp_path / "hub")
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
        torch.save(tensors, tmp_path / "model.pt")
    synchronize()
    with pytest.raises(CheckpointError, match="nothing was loaded") as caught:
        load(on_meta("mixtral"), str(tmp_path / "model.pt"))
    expected = (
        "model.layers.1.mlp.experts.down_proj: the file has shape (11, 16, 24), the model (12,"
        " 16, 24)"
    )
    assert expected in str(caught.value)


def test_two_versions_in_one_file_are_refused(tmp_path: Path) -> None:
    model = made("vit")
    model.save_pretrained(tmp_path / "hub")
    name = "vit.layers.0.mlp.fc2.bias"
    torch.save({**tensors_in(tmp_path / "hub"), name: torch.zeros(16)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=f"two tensors of the file are {name} of the model"):
        load(made("vit"), tmp_path / "model.pt")


def test_a_tokenizer_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="a tokenizer is saved in a directory: end the name in a slash"
    ):
        save(nn.Linear(2, 2), tmp_path / "model.pt", tokenizer=object())


@on_ranks(2)
def test_files_and_checkpoints_keep_the_names_of_the_model(tmp_path: Path) -> None:
    """A model that the hub names otherwise comes back from both."""
    model = BMTrainModelWrapper(made("mixtral"))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    save(model, str(tmp_path / "model.pt"))
    save_checkpoint(str(tmp_path / "run"), model)
    from_file, from_checkpoint = on_meta("mixtral"), on_meta("mixtral")
    load(from_file, str(tmp_path / "model.pt"))
    load_checkpoint(str(tmp_path / "run"), from_checkpoint)
    for fresh in (from_file, from_checkpoint):
        torch.testing.assert_close(dict(fresh.state_dict()), expected, rtol=0, atol=0)
    assert torch.load(tmp_path / "model.pt").keys() == expected.keys()
    assert tensors_in(tmp_path / "run" / "step-0" / "model").keys() == expected.keys()


@on_ranks(2)
def test_ranks_share_the_conversion_of_a_save(tmp_path: Path) -> None:
    if rank() == 0:
        made("olmoe").save_pretrained(tmp_path / "hub")
    synchronize()
    model = on_meta("olmoe")
    load(model, str(tmp_path / "hub"))
    converted = []
    original = hub_names.Group.convert

    def convert(self: Any, model: Any, tensors: Any) -> Any:
        if not any(tensor.is_meta for tensor in tensors.values()):
            converted.append(self)
        return original(self, model, tensors)

    with mock.patch.object(hub_names.Group, "convert", convert):
        save(model, f"{tmp_path}/saved/")
    assert len(converted) == 2  # of two layers with two groups each
