"""Training equals that of the plain Trainer on one process with the same global batch: logs,
callbacks, parameters.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from trainer_runs import assert_same_training, model_of, trained_by_bmt, trained_plainly

from bmt_testing import run_ranks

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def loss_of_user(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / (
        (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )


class MeanLoss(torch.nn.Module):
    """A model without transformers' classes, whose loss is the mean over its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(40, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 40)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        logits = self.head(hidden)
        each = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), input_ids.roll(-1, 1), reduction="none"
        )
        each = each * attention_mask
        return {"loss": each.mean(), "logits": logits}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, options of both, options of bmt
    "one rank": (1, {**EVALUATED, "max_grad_norm": 0.5}, {}),
    "accumulation of unequal lengths": (
        2,
        {
            **EVALUATED,
            "gradient_accumulation_steps": 2,
            "include_num_input_tokens_seen": "all",
            "max_grad_norm": 0.5,
        },
        {"zero_level": 2},
    ),
    # 12 batches of an epoch on each rank: updates of 5, 5 and 2
    "epochs that accumulation does not divide": (
        2,
        {
            "max_steps": -1,
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 5,
            "model": functools.partial(model_of, "gpt2"),
            "logging_strategy": "epoch",
            "eval_strategy": "epoch",
            "logging_first_step": True,
            "eval_on_start": True,
        },
        {"zero_level": 0},
    ),
    "four ranks, recomputation": (
        4,
        {
            "activation_checkpointing": True,
            "max_grad_norm": 0,
            "include_num_input_tokens_seen": "non_padding",
        },
        {},
    ),
    "a loss of the user's": (
        2,
        {"compute_loss_func": loss_of_user, "gradient_accumulation_steps": 2, "optim": "adagrad"},
        {"zero_level": 1},
    ),
    "label smoothing": (
        2,
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
        {"offload_optimizer": True},
    ),
    "a model that is not of transformers": (
        2,
        {
            "model": MeanLoss,
            "gradient_accumulation_steps": 2,
            "optim": "sgd",
            "train_sampling_strategy": "sequential",
        },
        {},
    ),
    "bfloat16": (2, {"bf16": True, **EVALUATED, "activation_checkpointing": True}, {}),
    "a scheduler that waits for metrics": (
        2,
        {
            **EVALUATED,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
            "eval_steps": 1,
            "learning_rate": 0.05,
            "warmup_steps": 0,
        },
        {},
    ),
}


def trained_on_ranks(name: str, folder: str) -> dict[str, Any]:
    _, options, of_bmt = CASES[name]
    return trained_by_bmt(folder, {**options, **of_bmt})


@pytest.mark.parametrize("name", CASES)
def test_a_training_equals_that_of_the_plain_trainer(name: str, tmp_path: Path) -> None:
    world_size, options, _ = CASES[name]
    expected = trained_plainly(tmp_path / "plain", world_size, options)
    for found in run_ranks(trained_on_ranks, world_size, name, str(tmp_path / "bmt"), init=None):
        # Half types round differently where one process has more rows in a product, and the plain
        # Trainer's loss rounds its gradients to bfloat16; later steps amplify that.
        of_half = {"rtol": 3e-3, "state_atol": 2e-3} if "bf16" in options else {}
        assert_same_training(found, expected, **of_half)
        first, of_plain = (
            next(line["loss"] for line in each["log"] if "loss" in line)
            for each in (found, expected)
        )
        assert first == pytest.approx(of_plain, rel=1e-6)
