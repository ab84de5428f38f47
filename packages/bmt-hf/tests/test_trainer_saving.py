"""Saved models and checkpoints are what ``from_pretrained`` reads; the best one is kept and loaded
as the plain Trainer does.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import transformers
from tokenizers import Tokenizer, models
from trainer_runs import (
    RUN,
    accelerate_forgets,
    bmt_trainer,
    model_of,
    plain_trainer,
    trained,
    trained_by_bmt,
    whole_state,
)

import bmt_checkpoint
import bmt_core
from bmt_testing import RankFailure, run_ranks

BEST = {
    "max_steps": 6,
    "learning_rate": 0.03,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(40)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1"
    )


def saved(folder: str, options: dict[str, Any]) -> Any:
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {**options, "processing_class": tokenizer()})
        trainer.train()
        trainer.save_model(f"{folder}/model")
        trainer.save_model()  # beside the checkpoints
        trainer.save_state()
        return whole_state(trainer.model)


def test_a_saved_model_and_a_checkpoint_load_by_from_pretrained(tmp_path: Path) -> None:
    options = {
        "model": functools.partial(model_of, "gpt2"),
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    for state in run_ranks(saved, 2, str(tmp_path), options, init=RUN):
        for folder in ("model", "checkpoint-2", "."):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())
            assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / folder)) == 40
            arguments = torch.load(tmp_path / folder / "training_args.bin", weights_only=False)
            assert arguments.max_steps == 2
    assert {"model", "checkpoint-2"} == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {
        "trainer_state.json",
        "training",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    } <= files
    state_of = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert (
        state_of["global_step"] == 2
        and json.loads((tmp_path / "trainer_state.json").read_text())["max_steps"] == 2
    )


def directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def best_of(trainer: Any) -> Any:
    with accelerate_forgets():
        found = trained(trainer)
        state = trainer.state
        best = (
            None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name
        )
        return found["state"], best, state.best_global_step, state.best_metric


def best_by_bmt(folder: str, options: dict[str, Any]) -> Any:
    return best_of(bmt_trainer(folder, options))


@pytest.mark.parametrize(
    "options",
    [
        {"save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": True},
        {"save_strategy": "best", "save_total_limit": 1},
        {
            "save_strategy": "epoch",
            "eval_strategy": "epoch",
            "max_steps": -1,
            "num_train_epochs": 2,
            "greater_is_better": True,
        },
    ],
)
def test_the_best_model_is_kept_and_loaded_as_by_the_plain_trainer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**BEST, **options}
    state, *expected = best_of(plain_trainer(tmp_path / "plain", 2, options))
    for found, *best in run_ranks(best_by_bmt, 2, str(tmp_path / "bmt"), options, init=RUN):
        torch.testing.assert_close(found, state, rtol=1e-4, atol=5e-6)
        assert best[:-1] == expected[:-1] and best[-1] == pytest.approx(expected[-1], rel=1e-5)
    assert directories(tmp_path / "bmt") == directories(tmp_path / "plain")


def test_save_only_model_leaves_out_what_a_training_needs(tmp_path: Path) -> None:
    options = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_only_model": True,
        "save_total_limit": 1,
    }
    (found, _) = run_ranks(trained_by_bmt, 2, str(tmp_path), options, init=RUN)
    assert (
        directories(tmp_path) == ["checkpoint-2"]
        and not (tmp_path / "checkpoint-2" / "training").exists()
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(value, found["state"][name]) for name, value in model.named_parameters())


def test_a_second_training_that_saves_to_one_directory_is_refused_at_its_start(
    tmp_path: Path,
) -> None:
    bmt_core.init_distributed(device="cpu")
    try:
        bmt_checkpoint.lock_checkpoints(tmp_path)
        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        with pytest.raises(RankFailure) as failure:
            run_ranks(trained_by_bmt, 2, str(tmp_path), options, init=RUN)
        assert len(failure.value.errors) == 2
        for error in failure.value.errors.values():
            assert f"Another run writes its checkpoints to {tmp_path}: process" in str(error)
        run_ranks(trained_by_bmt, 2, str(tmp_path), {"max_steps": 2}, init=RUN)  # saves nothing
    finally:
        bmt_core.shutdown()


def saved_twice(folder: str) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    for seed in (1, 2):
        trained_by_bmt(folder, {**options, "seed": seed})


def test_a_checkpoint_of_an_earlier_training_is_replaced(tmp_path: Path) -> None:
    run_ranks(saved_twice, 2, str(tmp_path), init=RUN)
    assert directories(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    arguments = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert arguments.seed == 2
