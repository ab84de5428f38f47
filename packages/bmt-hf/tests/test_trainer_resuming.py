"""A training that is resumed from a checkpoint goes on as if it had never stopped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from trainer_runs import (
    RUN,
    accelerate_forgets,
    assert_same_training,
    bmt_trainer,
    model_of,
    trained,
    trained_plainly,
)
from transformers import EarlyStoppingCallback

import bmt_hf
from bmt_core.errors import CheckpointError
from bmt_testing import run_ranks

DROPOUT = functools.partial(model_of, "gpt2", resid_pdrop=0.1, embd_pdrop=0.1)
# 12 batches of an epoch, 6 updates: checkpoints in both epochs, and between them.
OPTIONS = {
    "max_steps": 10,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "include_num_input_tokens_seen": "all",
}


def trained_and_resumed(
    folder: str, options: dict[str, Any], steps: list[int]
) -> list[dict[str, Any]]:
    with accelerate_forgets():
        found = [trained(bmt_trainer(folder, options))]
        for step in steps:
            other = {**options, "save_strategy": "no"}
            found.append(
                trained(bmt_trainer(f"{folder}-other", other), f"{folder}/checkpoint-{step}")
            )
        return found


def assert_went_on(resumed: dict[str, Any], whole: dict[str, Any], step: int) -> None:
    """Every bit is equal."""
    assert [line for line in resumed["log"] if "train_loss" not in line] == [
        line for line in whole["log"] if "train_loss" not in line
    ]
    later = [event[:3] for event in whole["events"] if event[1] > step and event[0] != "on_save"]
    assert [event[:3] for event in resumed["events"] if event[1] > step] == later
    assert all(torch.equal(value, whole["state"][name]) for name, value in resumed["state"].items())
    assert resumed["output"][0] == whole["output"][0]


def test_a_resumed_training_goes_on_bit_for_bit_in_and_between_epochs(tmp_path: Path) -> None:
    options = {**OPTIONS, "model": DROPOUT}
    steps = [4, 6, 8]
    for whole, *resumed in run_ranks(
        trained_and_resumed, 2, str(tmp_path / "run"), options, steps, init=RUN
    ):
        assert len({event[1] for event in whole["events"]}) == 11
        for step, found in zip(steps, resumed, strict=True):
            assert_went_on(found, whole, step)


def resumed_from(folder: str, options: dict[str, Any], checkpoint: Any) -> dict[str, Any]:
    with accelerate_forgets():
        return trained(bmt_trainer(folder, options), checkpoint)


def test_a_training_resumes_on_other_numbers_of_ranks_and_levels(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(resumed_from, 2, folder, OPTIONS, None, init=RUN)
    expected = trained_plainly(tmp_path / "plain", 2, {**OPTIONS, "save_strategy": "no"})
    options = {
        **OPTIONS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "zero_level": 1,
    }
    (found,) = run_ranks(
        resumed_from, 1, folder + "-other", options, f"{folder}/checkpoint-8", init=None
    )
    torch.testing.assert_close(found["log"][:-1], expected["log"][:-1], rtol=2e-5, atol=0)
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-4, atol=2e-6)


def test_true_resumes_from_the_last_checkpoint_which_is_complete(tmp_path: Path) -> None:
    folder, options = tmp_path / "run", {**OPTIONS, "max_steps": 4}
    run_ranks(resumed_from, 2, str(folder), options, None, init=RUN)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    # A save that did not finish.
    (folder / "unfinished-checkpoint" / "checkpoint-6").mkdir(parents=True)
    for found in run_ranks(
        resumed_from, 2, str(folder), {**options, "max_steps": 6}, True, init=RUN
    ):
        assert found["output"][0] == 6 and found["events"][0][1] == 4
    assert sorted(path.name for path in folder.iterdir()) == [
        f"checkpoint-{step}" for step in (2, 4, 6)
    ]


def stopped_early(folder: str, steps: list[int | None]) -> list[Any]:
    """Trainings with a metric that does not improve, each from the checkpoint of a step."""
    options = {
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "metric_for_best_model": "count",
        "greater_is_better": True,
        "restore_callback_states_from_checkpoint": True,
        "load_best_model_at_end": True,
    }
    found = []
    with accelerate_forgets():
        for step in steps:
            trainer = bmt_trainer(folder, {**options, "callbacks": [EarlyStoppingCallback(3)]})
            trainer.train(None if step is None else f"{folder}/checkpoint-{step}")
            found.append((trainer.state.global_step, trainer.state.best_global_step))
    return found


def test_the_patience_of_early_stopping_is_restored_with_the_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(stopped_early, 2, str(tmp_path / "run"), [None, 3], init=RUN):
        assert found == [(4, 1), (4, 1)]


def refused(folder: str, checkpoint: Any) -> str:
    with accelerate_forgets():
        with pytest.raises(CheckpointError) as raised:
            bmt_trainer(folder, {}).train(resume_from_checkpoint=checkpoint)
        return str(raised.value)


def test_a_directory_that_is_no_checkpoint_is_named_on_every_rank(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    trained_plainly(plain, 2, {"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    for checkpoint, expected in [
        (True, "has no checkpoint-N"),
        (str(plain / "checkpoint-1"), "it is no checkpoint of bmt_hf.Trainer"),
        (str(tmp_path / "nowhere"), "nowhere lacks training"),
    ]:
        for text in run_ranks(refused, 2, str(tmp_path / "run"), checkpoint, init=RUN):
            assert expected in text


def skipping(folder: str) -> list[int]:
    """The first batch after resuming, with the data skipped or not."""
    seen: list[int] = []

    class Noting(bmt_hf.Trainer):
        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            seen.append(int(inputs["input_ids"].sum()))
            return super().training_step(model, inputs, num_items_in_batch)

    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "ignore_data_skip": False}
    with accelerate_forgets():
        for checkpoint, ignores in (
            (None, False),
            (f"{folder}/checkpoint-2", False),
            (f"{folder}/checkpoint-2", True),
        ):
            trainer = bmt_trainer(folder, {**options, "ignore_data_skip": ignores})
            trainer.__class__ = Noting
            trainer.train(checkpoint)
    return seen


def test_ignore_data_skip_begins_the_epoch_anew(tmp_path: Path) -> None:
    for first, second, third, resumed, anew in run_ranks(
        skipping, 2, str(tmp_path / "run"), init=RUN
    ):
        assert len({first, second, third}) == 3
        assert (resumed, anew) == (third, first)


def test_assert_same_training_sees_other_trainings(tmp_path: Path) -> None:
    found, other = (
        trained_plainly(tmp_path, 1, {"max_steps": 2, "learning_rate": rate})
        for rate in (0.01, 0.011)
    )
    with pytest.raises(AssertionError):
        assert_same_training(found, other)
