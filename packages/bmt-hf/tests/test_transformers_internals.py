"""What breaks without each private part of transformers and accelerate that bmt-hf uses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import transformers
from accelerate import Accelerator
from trainer_runs import accelerate_forgets, bmt_trainer

from bmt_testing import run_ranks


def logged_tokens(folder: str) -> Any:
    with accelerate_forgets():
        options = {"include_num_input_tokens_seen": True, "max_steps": 2, "logging_steps": 2}
        trainer = bmt_trainer(folder, options)
        trainer.train()
        line = trainer.state.log_history[0]
        return line["num_input_tokens_seen"], line["train_tokens_per_second"] > 0


def test_tokens_are_counted_over_ranks_and_their_speed_is_logged(tmp_path: Path) -> None:
    """``Trainer._track_num_input_tokens`` counts them, and ``log`` reads
    ``Trainer._initial_num_input_tokens_seen``.
    """
    assert run_ranks(logged_tokens, 2, str(tmp_path), init=None) == [(2 * 2 * 2 * 12, True)] * 2


class Counting(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def counted(folder: str) -> list[int]:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    found = []
    with accelerate_forgets():
        for restores in (True, False):
            trainer = bmt_trainer(
                folder,
                {
                    **options,
                    "callbacks": [Counting()],
                    "restore_callback_states_from_checkpoint": restores,
                },
            )
            trainer.train(None if not found else f"{folder}/checkpoint-3")
            trainer.train(f"{folder}/checkpoint-3")
            found.append(
                next(c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Counting))
            )
    return found


def test_states_of_callbacks_are_restored_if_that_is_asked_for(tmp_path: Path) -> None:
    """``Trainer._load_callback_state`` restores them."""
    assert run_ranks(counted, 2, str(tmp_path), init=None) == [[4, 2]] * 2


def test_an_accelerator_scales_losses_by_its_attribute_scaler() -> None:
    """``ManagersScale`` takes its place: without it, gradients of fp16 are not scaled, and in a run
    of sums not divided.
    """

    class Doubling:
        def scale(self, loss: torch.Tensor) -> torch.Tensor:
            return 2 * loss

    with accelerate_forgets():
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = Doubling()
        weight = torch.ones((), requires_grad=True)
        accelerator.backward(3 * weight)
    assert weight.grad == 6


def test_push_to_hub_saves_by_the_keyword_that_save_model_has() -> None:
    assert "self.save_model(_internal_call=True)" in inspect.getsource(
        transformers.Trainer.push_to_hub
    )
