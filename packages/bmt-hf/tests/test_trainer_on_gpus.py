"""On GPUs, too, training equals that of the plain Trainer, in all types, and resumes bit
for bit.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from test_trainer_resuming import DROPOUT, OPTIONS, assert_went_on, trained_and_resumed
from trainer_runs import accelerate_forgets, bmt_trainer, model_of, trained_by_bmt, trained_plainly

from bmt_testing import run_ranks

GPT2 = functools.partial(model_of, "gpt2")
ON_GPU = {"use_cpu": False, "model": GPT2, "gradient_accumulation_steps": 2}
MANY = [1, pytest.param(2, marks=pytest.mark.gpu(2))]


def large_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Gradients of float16 overflow until the loss scale is small enough."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 1000 * total / num_items_in_batch


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # options of both, options of bmt, the tolerance of losses and norms
    "float32": ({"eval_strategy": "steps", "eval_steps": 2}, {"zero_level": 2}, 1e-4),
    "offload": ({}, {"offload_optimizer": True}, 1e-4),
    "bfloat16": ({"bf16": True, "activation_checkpointing": True}, {}, 5e-3),
    # The fused AdamW steps its scheduler also when it skips a step.
    "float16": (
        {"fp16": True, "optim": "adamw_torch", "compute_loss_func": large_loss, "max_steps": 12},
        {},
        5e-3,
    ),
}


def trained_on_gpu(name: str, folder: str, plain_of: int | None = None) -> dict[str, Any]:
    """By bmt, or by the plain Trainer with the batch of ``plain_of`` ranks."""
    options, of_bmt, _ = CASES[name]
    options = {**ON_GPU, **options}
    if plain_of is not None:
        return trained_plainly(folder, plain_of, options)
    return trained_by_bmt(folder, {**options, **of_bmt})


# Not float16 on two ranks: a rank's part of the batch overflows at another scale than the whole.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 1) for name in CASES]
    + [pytest.param(name, 2, marks=pytest.mark.gpu(2)) for name in (*CASES,)[:-1]],
)
def test_a_training_on_gpus_equals_that_of_the_plain_trainer(
    name: str, world_size: int, tmp_path: Path
) -> None:
    rtol = CASES[name][2]
    (expected,) = run_ranks(trained_on_gpu, 1, name, str(tmp_path / "plain"), world_size, init=None)
    results = run_ranks(trained_on_gpu, world_size, name, str(tmp_path / "bmt"), init=None)
    for found in results:
        assert found["events"] == expected["events"]
        assert (found["skipped"] > 0) == (name == "float16")
        for line, of_plain in zip(found["log"], expected["log"], strict=True):
            assert line.keys() == of_plain.keys()
            finite = [
                key for key in line if math.isfinite(line[key]) and math.isfinite(of_plain[key])
            ]
            assert finite == list(line) or [key for key in line if key not in finite] == [
                "grad_norm"
            ]
            for key in finite:
                assert line[key] == pytest.approx(of_plain[key], rel=rtol)
        torch.testing.assert_close(
            found["state"], expected["state"], rtol=20 * rtol, atol=rtol, check_device=False
        )


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", MANY)
@pytest.mark.parametrize("options", [{}, {"bf16": True, "offload_optimizer": True}, {"fp16": True}])
def test_a_training_on_gpus_resumes_bit_for_bit(
    world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**OPTIONS, "model": DROPOUT, "use_cpu": False, **options}
    for whole, *resumed in run_ranks(
        trained_and_resumed, world_size, str(tmp_path / "run"), options, [4, 8], init=None
    ):
        for step, found in zip([4, 8], resumed, strict=True):
            assert_went_on(found, whole, step)


def without_launcher(folder: str) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with accelerate_forgets():
        trainer = bmt_trainer(folder, ON_GPU)
        devices = {parameter.device for parameter in trainer.model.parameters()}
        return trainer.args.n_gpu, trainer.args.train_batch_size, devices == {trainer.args.device}


@pytest.mark.gpu
def test_a_run_of_one_rank_uses_one_gpu_however_many_there_are(tmp_path: Path) -> None:
    assert run_ranks(without_launcher, 1, str(tmp_path), init=None) == [(1, 2, True)]
