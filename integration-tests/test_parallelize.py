"""Hugging Face's models cut by plans and wrapped, compared with the plain models in one process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import bmt_checkpoint

pytest.importorskip("transformers")

import torch
from beside_torch import train_beside_torch
from compile_models import from_new
from plan_models import LENGTH, MODELS, WORDS, built, gpt2, inputs
from torch._dynamo.utils import counters
from tp_models import gradients_of
from transformers import GPT2ForSequenceClassification

import bmt_core
from bmt_core.run.collectives import all_gather
from bmt_testing import on_ranks, run_ranks
from bmt_tp import parallelize, plan_for, whole
from bmt_zero import Block, BMTrainModelWrapper
from bmtrain.loss import FusedCrossEntropy


def loss_of(model: Any, step: int, part: int, parts: int) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs(step, part, parts)).loss
    return loss


def train_from_file_to_file(folder: str) -> None:
    """Models that are made without values, loaded from the plain models' files, and at the end
    written to files.
    """
    for name, make in MODELS.items():
        expected = built(name)
        with torch.device("meta"):
            model = make().double()
        BMTrainModelWrapper(parallelize(model), init=False)
        bmt_checkpoint.load(model, f"{folder}/{name}.pt")
        train_beside_torch(model, expected, loss_of, rtol=1e-5)
        bmt_checkpoint.save(model, f"{folder}/{name} trained.pt")
        bmt_core.synchronize()
        written = torch.load(f"{folder}/{name} trained.pt", weights_only=True)
        same(name, written, expected.state_dict())


@pytest.mark.parametrize(
    ("ranks", "tp_size"),
    [pytest.param(4, 4, marks=pytest.mark.slow("bmt-tp", "bmt-zero", "bmt-params")), (4, 2)],
)
def test_training_and_files_equal_those_of_the_plain_model(
    ranks: int, tp_size: int, tmp_path: Path
) -> None:
    for name in MODELS:
        torch.save(built(name).state_dict(), tmp_path / f"{name}.pt")
    init = {"tp_size": tp_size}
    run_ranks(train_from_file_to_file, ranks, str(tmp_path), init=init, timeout=300)


def gradients_of_plain(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(name: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in found.items():  # float32 inside of the norms and rotations
        torch.testing.assert_close(
            value, wanted[key], rtol=1e-5, atol=1e-6, msg=lambda text, k=key: f"{name} {k}: {text}"
        )


# ---- what else a parallel model can do ----


def dropped(use_checkpoint: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = BMTrainModelWrapper(parallelize(built("gpt2", dropout=0.5)))
    for module in model.modules():
        if isinstance(module, Block):
            module._use_checkpoint = use_checkpoint
    torch.manual_seed(4)
    loss = model.train()(**inputs(0)).loss
    loss.backward()
    return [loss.detach(), *gradients_of(model).values(), torch.rand(2)]


def dropout_repeats_in_recomputation_and_agrees_where_activations_are_whole() -> None:
    kept, again = dropped(False), dropped(True)
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(part, all_gather(part)[0]) for part in kept)


def local_logits_for_a_parallel_loss() -> None:
    plain = built("llama")
    model: Any = built("llama")
    BMTrainModelWrapper(parallelize(model, plan_for(model, gather_logits=False)))
    batch = inputs(0)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    logits = model(input_ids=ids, attention_mask=mask).logits
    assert logits.shape == (4, LENGTH, WORDS // 2)
    loss = FusedCrossEntropy(parallel=True)(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected = plain(**batch).loss
    torch.testing.assert_close(loss, expected, check_dtype=False)
    loss.backward()
    expected.backward()
    same(
        "llama",
        gradients_of(model),
        gradients_of_plain(plain),
    )


def another_head_and_an_odd_vocabulary() -> None:
    batch = {**inputs(0), "labels": torch.tensor([0, 1, 1, 0])}
    results = []
    for cut in (False, True):
        torch.manual_seed(0)
        model: Any = GPT2ForSequenceClassification(
            gpt2(vocab_size=41, pad_token_id=25).config
        ).double()
        if cut:
            BMTrainModelWrapper(parallelize(model, plan_for(model, split_vocabulary=False)))
        loss = model(**batch).loss
        loss.backward()
        gradients = gradients_of(model) if cut else {n: p.grad for n, p in model.named_parameters()}
        results.append({**gradients, "loss": loss.detach()})
    same("classifier", results[1], results[0])


def made_on_the_meta_device() -> None:
    for name, make in MODELS.items():
        values = []
        for plan in (False, True):
            with torch.device("meta"):
                model = make()
            torch.manual_seed(5)
            values.append(
                BMTrainModelWrapper(parallelize(model) if plan else whole(model)).state_dict()
            )
        assert all(torch.equal(value, values[1][key]) for key, value in values[0].items()), name


@on_ranks(2, init={"tp_size": 2}, timeout=300)
def test_blocks_are_compiled_in_one_piece() -> None:
    plain, model = built("qwen2"), parallelize(built("qwen2"))
    with from_new("aot_eager"):
        for layer in model.model.layers:  # type: ignore[union-attr]
            Block(layer, compile=True)
        BMTrainModelWrapper(model)
        expected, loss = plain(**inputs(0)).loss, model(**inputs(0)).loss
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    same(
        "compiled",
        gradients_of(model),
        gradients_of_plain(plain),
    )


def copied() -> None:
    """Modules get classes that are made while running, some of them two."""
    model = BMTrainModelWrapper(parallelize(built("gpt2"))).eval()
    expected = model(**inputs(0)).loss
    torch.testing.assert_close(expected, built("gpt2").eval()(**inputs(0)).loss)
    assert torch.equal(copy.deepcopy(model)(**inputs(0)).loss, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs(0)).loss, expected)


@on_ranks(2, init={"tp_size": 2}, timeout=300)
def test_generation_by_a_split_model_is_refused_on_every_rank_with_the_way_out() -> None:
    """Before the model is wrapped and after."""
    refusal = r"(?s)^generate\(\) cannot run.*load the file with tp_size=1"
    for name in MODELS:
        model: Any = parallelize(built(name)).eval()
        for options in ({}, {"use_cache": False}):
            with pytest.raises(bmt_core.ConfigError, match=refusal):
                model.generate(inputs(0)["input_ids"], max_new_tokens=2, **options)
            BMTrainModelWrapper(model)
        model(**inputs(0)).loss.backward()


@on_ranks(2, init={"tp_size": 2}, timeout=300)
def test_dropout_local_logits_other_heads_the_meta_device_and_copies() -> None:
    dropout_repeats_in_recomputation_and_agrees_where_activations_are_whole()
    local_logits_for_a_parallel_loss()
    another_head_and_an_odd_vocabulary()
    made_on_the_meta_device()
    copied()
