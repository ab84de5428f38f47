"""Losses and gradients do not depend on how a batch is divided over ranks and micro-batches, also
of models whose loss is a mean and ignores ``num_items_in_batch``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import transformers
from torch.nn.functional import cross_entropy
from trainer_runs import accelerate_forgets, bmt_trainer, model_of, plain_trainer, trained

from bmt_testing import run_ranks

ROWS = 8  # in a step, of all ranks and micro-batches
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return make()


def llama_for_rows() -> Any:
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SIZES, num_labels=3)
    )


def llama_for_tokens() -> Any:
    return transformers.LlamaForTokenClassification(
        transformers.LlamaConfig(**SIZES, num_labels=40, classifier_dropout=0.0)
    )


def bert_for_rows() -> Any:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **off))


def t5() -> Any:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("vocab_size", "pad_token_id")}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    )


def mean_of_user(outputs: Any, labels: torch.Tensor, **ignored: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def data_of(kind: str) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    found = []
    for number in range(2 * ROWS):
        ids = torch.randint(1, 40, (6,), generator=drawn).tolist()
        image = torch.randn(3, 16, 16, generator=drawn)
        inputs = {"pixel_values": image} if kind == "images" else {"input_ids": ids}
        found.append({**inputs, "labels": ids if kind == "tokens" else number % 2})
    return found


MODELS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "rows by Llama": (llama_for_rows, "rows", {}),
    "tokens by Llama": (llama_for_tokens, "tokens", {}),
    "rows by BERT": (bert_for_rows, "rows", {}),
    "T5": (t5, "tokens", {}),
    "ViT": (vit, "images", {}),
    "a mean of the user's": (model_of, "tokens", {"compute_loss_func": mean_of_user}),
    # Its loss reads the number.
    "Llama": (model_of, "tokens", {}),
}


def options_of(name: str, rows: int, accumulation: int) -> dict[str, Any]:
    make, kind, options = MODELS[name]
    return {
        "model": functools.partial(seeded, make),
        "train_dataset": data_of(kind),
        "data_collator": transformers.default_data_collator,
        "compute_metrics": None,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        **options,
    }


def result_of(trainer: Any) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    found = trained(trainer)
    steps = [(line["loss"], line["grad_norm"]) for line in found["log"] if "loss" in line]
    return steps, found["state"]


def trained_by_bmt(folder: str, ranks: int, accumulation: int) -> dict[str, Any]:
    rows = ROWS // ranks // accumulation
    with accelerate_forgets():
        return {
            name: result_of(bmt_trainer(folder, options_of(name, rows, accumulation)))
            for name in MODELS
        }


@functools.cache
def trained_plainly(folder: Path) -> dict[str, Any]:
    with accelerate_forgets():
        return {
            name: result_of(plain_trainer(folder, 1, options_of(name, ROWS, 1))) for name in MODELS
        }


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_losses_and_gradients_are_those_of_one_batch_in_one_process(
    ranks: int, accumulation: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = trained_plainly(tmp_path_factory.getbasetemp() / "plain")
    found = run_ranks(
        trained_by_bmt, ranks, str(tmp_path), ranks, accumulation, init=None, timeout=180
    )
    for of_rank in found:
        for name, (steps, state) in expected.items():
            assert len(steps) == 2
            own_steps, own_state = of_rank[name]
            torch.testing.assert_close(own_steps, steps, rtol=1e-4, atol=0, msg=name)
            torch.testing.assert_close(own_state, state, rtol=1e-3, atol=1e-5)


SIZES_OF_EVALUATIONS = (11, 8, 3, 1)


def evaluated(trainer: Any, kind: str) -> list[tuple[float, float]]:
    """The losses of ``evaluate`` and ``predict``, of a model that was not trained."""
    found = []
    for size in SIZES_OF_EVALUATIONS:
        rows = data_of(kind)[:size]
        metrics = trainer.evaluate(rows), trainer.predict(rows).metrics
        found.append((metrics[0]["eval_loss"], metrics[1]["test_loss"]))
    return found


def evaluated_by_bmt(folder: str) -> dict[str, Any]:
    with accelerate_forgets():
        return {
            name: evaluated(
                bmt_trainer(folder, {**options_of(name, 2, 1), "per_device_eval_batch_size": 2}),
                MODELS[name][1],
            )
            for name in MODELS
        }


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_evaluation_counts_each_row_once(ranks: int, tmp_path: Path) -> None:
    with accelerate_forgets():
        expected = {
            name: evaluated(
                plain_trainer(
                    tmp_path, ranks, {**options_of(name, 2, 1), "per_device_eval_batch_size": 2}
                ),
                MODELS[name][1],
            )
            for name in MODELS
        }
    for found in run_ranks(evaluated_by_bmt, ranks, str(tmp_path), init=None, timeout=180):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
