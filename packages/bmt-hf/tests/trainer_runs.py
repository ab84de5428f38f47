"""Trainings by bmt's Trainer on ranks, and by the plain one in this process, on the same data
and models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import bmt_hf
from bmt_params import DistributedParameter

TIMES = ("runtime", "per_second", "preparation_time")
"""Parts of the names of metrics that are times."""


def model_of(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(1)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, **{**sizes, **off, **options})
        )
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=40, **{**sizes, **options})
    )


def rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Sequences of different lengths, of which different parts are labels."""
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=drawn))
        ids = torch.randint(1, 40, (length,), generator=drawn).tolist()
        prompt = int(torch.randint(0, length - 2, (), generator=drawn))
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The collator: the same length for all batches, so that a batch may be divided over ranks."""
    ids = [row["input_ids"] + [0] * (12 - len(row["input_ids"])) for row in batch]
    labels = [row["labels"] + [-100] * (12 - len(row["labels"])) for row in batch]
    mask = [[1] * len(row["input_ids"]) + [0] * (12 - len(row["input_ids"])) for row in batch]
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    found, expected = logits[:, :-1].argmax(-1), labels[:, 1:]
    is_counted = expected != -100
    return {
        "accuracy": (found == expected)[is_counted].double().mean().item(),
        "count": len(labels),
    }


class Recorder(transformers.TrainerCallback):
    """Notes every event with what callbacks read then."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rate = (
                None if kwargs["optimizer"] is None else kwargs["optimizer"].param_groups[0]["lr"]
            )
            flags = {key: value for key, value in vars(control).items() if value}
            self.events.append(
                (name, state.global_step, round(state.epoch, 6), state.max_steps, flags, rate)
            )

        return note


SETTINGS = {
    "max_steps": 5,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-4,  # so that rounding of gradients near zero stays small in the update
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}


RUN = {"gradients": "mean", "seed": 3}
"""The run that these settings start, for ``run_ranks``: then tests share one."""


def trained(trainer: Any, resume: Any = None) -> dict[str, Any]:
    """Train; return all that a user can see of it."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    output = trainer.train(resume_from_checkpoint=resume)
    trainer.remove_callback(recorder)
    return {
        "log": without_times(trainer.state.log_history),
        "events": recorder.events,
        "output": (output.global_step, output.training_loss),
        "state": whole_state(trainer.model),
        "skipped": getattr(getattr(trainer, "manager", None), "skipped_steps", 0),
    }


def without_times(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {key: value for key, value in each.items() if not any(part in key for part in TIMES)}
        for each in log
    ]


@torch.no_grad()
def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {
        n: p.gather_all() if isinstance(p, DistributedParameter) else p.detach().clone()
        for n, p in named
    }


def plain_trainer(folder: Path | str, world_size: int, options: dict[str, Any]) -> Any:
    """The plain Trainer with the batch of ``world_size`` ranks."""
    model, own, settings = divided(options, world_size)
    return transformers.Trainer(
        args=transformers.TrainingArguments(str(folder), **settings), **model, **own
    )


def bmt_trainer(folder: Path | str, options: dict[str, Any]) -> Any:
    model, own, settings = divided(options, 1)
    arguments = bmt_hf.TrainingArguments(str(folder), **settings)  # before the model
    return bmt_hf.Trainer(args=arguments, **model, **own)


def divided(
    options: dict[str, Any], factor: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a trainer is made of: its model, its other arguments, and the training arguments, with
    ``factor`` times the batch.
    """
    options = {"use_cpu": True, **SETTINGS, **data(), **options}
    made = {} if "model_init" in options else {"model": options.pop("model", model_of)()}
    own = {name: options.pop(name) for name in TRAINER_OPTIONS if name in options}
    sizes = {name: factor * options.pop(name, 2) for name in BATCH_SIZES}
    return made, own, {**options, **sizes}


TRAINER_OPTIONS = (
    *(
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "compute_metrics",
        "callbacks",
        "optimizers",
        "model_init",
    ),
    *("processing_class", "compute_loss_func", "preprocess_logits_for_metrics"),
)
BATCH_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size")


def data() -> dict[str, Any]:
    return {
        "data_collator": padded,
        "train_dataset": rows(48),
        "eval_dataset": rows(16, 1),
        "compute_metrics": accuracy,
    }


@contextmanager
def accelerate_forgets() -> Iterator[None]:
    """What accelerate knows of this process ends with the block, as with the process of a user."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def trained_by_bmt(folder: str, options: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    """For ranks, with ``init=RUN``, or ``init=None``: the arguments start the run."""
    with accelerate_forgets():
        return trained(bmt_trainer(folder, options), resume)


def trained_plainly(
    folder: Path | str, world_size: int, options: dict[str, Any], resume: Any = None
) -> dict[str, Any]:
    with accelerate_forgets():
        return trained(plain_trainer(folder, world_size, options), resume)


def assert_same_training(
    found: dict[str, Any],
    expected: dict[str, Any],
    *,
    rtol: float = 2e-5,
    state_atol: float | None = None,
) -> None:
    """``state_atol``: by how much a parameter may differ, ``rtol`` / 10 by default."""
    assert found["events"] == expected["events"]
    assert [each.keys() for each in found["log"]] == [each.keys() for each in expected["log"]]
    torch.testing.assert_close(found["log"], expected["log"], rtol=rtol, atol=1e-7)
    torch.testing.assert_close(found["output"], expected["output"], rtol=rtol, atol=0)
    torch.testing.assert_close(
        found["state"],
        expected["state"],
        rtol=5 * rtol,
        atol=rtol / 10 if state_atol is None else state_atol,
    )
