"""What users give to the Trainer and override in it: models, optimizers, steps, data; and what
it refuses.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from trainer_runs import (
    RUN,
    SETTINGS,
    accelerate_forgets,
    assert_same_training,
    bmt_trainer,
    model_of,
    padded,
    plain_trainer,
    rows,
    trained,
    trained_by_bmt,
    trained_plainly,
    whole_state,
)

import bmt_core
import bmt_hf
from bmt_core.errors import ConfigError
from bmt_optim import AdamW, param_groups
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper

# --- models ---


def from_meta(folder: str) -> Any:
    def on_meta() -> Any:
        with torch.device("meta"):
            return model_of()

    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"model": on_meta, "max_steps": 3})
        return whole_state(trainer.model), trained(trainer)


def test_a_model_on_the_meta_device_is_initialised_and_trained(tmp_path: Path) -> None:
    results = run_ranks(from_meta, 2, str(tmp_path), init=None)
    before = results[0][0]
    assert 0.01 < before["lm_head.weight"].std() < 0.03

    def with_these_values() -> Any:
        model = model_of()
        model.load_state_dict(before)
        return model

    expected = trained_plainly(tmp_path, 2, {"model": with_these_values, "max_steps": 3})
    for _, found in results:
        assert_same_training(found, expected)


def with_other_values(folder: str) -> Any:
    """A wrapped model, whose Blocks have levels of their own; and a plain one, which every rank has
    drawn differently.
    """
    with accelerate_forgets():
        arguments = bmt_hf.TrainingArguments(folder, use_cpu=True, **SETTINGS)
        model = model_of()
        model.model.layers = nn.ModuleList(
            Block(layer, zero_level=1 + n) for n, layer in enumerate(model.model.layers)
        )
        trainer = bmt_hf.Trainer(BMTrainModelWrapper(model), arguments)
        assert trainer.model is model and [layer._zero_level for layer in model.model.layers] == [
            1,
            2,
        ]
        other = model_of()
        nn.init.constant_(other.lm_head.weight, float(bmt_core.rank()))
        trainer = bmt_hf.Trainer(other, arguments)
        return whole_state(trainer.model)["lm_head.weight"].abs().max().item()


def test_a_wrapped_model_stays_as_it_is_and_a_plain_one_has_rank_0s_values(tmp_path: Path) -> None:
    assert run_ranks(with_other_values, 2, str(tmp_path), init=None) == [0.0, 0.0]


def refusals(folder: str) -> list[str]:
    arguments = bmt_hf.TrainingArguments(folder, **SETTINGS)
    quantized = model_of()
    quantized.quantization_method = "gptq"
    optimizer = torch.optim.SGD(quantized.parameters())
    placed = model_of()
    placed.hf_device_map = {"": 0}
    offloading = bmt_hf.TrainingArguments(folder, offload_optimizer=True, **SETTINGS)
    attempts: list[Any] = [
        lambda: bmt_hf.Trainer("gpt2", arguments),
        lambda: bmt_hf.Trainer(nn.DataParallel(model_of()), arguments),
        lambda: bmt_hf.Trainer(quantized, arguments),
        lambda: bmt_hf.Trainer(placed, arguments),
        lambda: bmt_hf.Trainer(torch.compile(model_of()), arguments),
        lambda: bmt_hf.Trainer(model_of(), transformers.TrainingArguments(folder, use_cpu=True)),
        lambda: bmt_hf.Trainer(model_of(), offloading, optimizers=(optimizer, None)),
        lambda: bmt_hf.Trainer(
            model_of(), arguments, train_dataset=rows(4)
        ).hyperparameter_search(),
        lambda: bmt_hf.Trainer(model_of(), arguments, train_dataset=rows(4)).train(
            trial={"learning_rate": 1}
        ),
        lambda: best_by_unknown_metric(folder),
    ]
    found = []
    with accelerate_forgets():
        for attempt in attempts:
            with pytest.raises(ConfigError) as raised:
                attempt()
            found.append(str(raised.value))
    return found


def best_by_unknown_metric(folder: str) -> None:
    options = {"metric_for_best_model": "bleu", "eval_strategy": "steps", "eval_steps": 1}
    bmt_trainer(folder, options).train()


def test_what_cannot_be_trained_is_refused_on_every_rank(tmp_path: Path) -> None:
    for texts in run_ranks(refusals, 2, str(tmp_path), init={"gradients": "mean"}):
        for text, part in zip(
            texts,
            [
                "cannot shard this str: it is no torch.nn.Module",
                "it is in a wrapper of torch",
                "it is quantized (gptq)",
                "it was loaded with a device_map",
                "it was compiled as a whole",
                (
                    "args must be bmt_hf.TrainingArguments, not"
                    " transformers.training_args.TrainingArguments"
                ),
                "Leave one of them out; bmt_optim.AdamOffloadOptimizer",
                "searches no hyperparameters",
                "searches no hyperparameters",
                (
                    "metric_for_best_model is 'bleu', and the evaluation gave epoch, eval_accuracy,"
                    " eval_count, eval_loss"
                ),
            ],
            strict=True,
        ):
            assert part in text


# --- optimizers ---


def chosen(folder: str) -> Any:
    found = []
    with accelerate_forgets():
        for options in (
            {},
            {"offload_optimizer": True, "activation_checkpointing": True},
            {
                "optim": "sgd",
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 2, "keep": "attention"},
            },
        ):
            trainer = bmt_trainer(folder, {**options, "max_steps": 1})
            trainer.train()
            blocks = [module for module in trainer.model.modules() if isinstance(module, Block)]
            recomputing = [block._use_checkpoint for block in blocks]
            kept = [block._bmt_block.keep is not None for block in blocks]
            decays = [
                (group["weight_decay"], len(group["params"]))
                for group in trainer.optimizer.param_groups
            ]
            found.append((type(trainer.optimizer).__name__, recomputing, kept, decays))
    return found


def test_arguments_choose_the_optimizer_its_groups_and_the_recomputation(tmp_path: Path) -> None:
    for found in run_ranks(chosen, 2, str(tmp_path), init={"gradients": "mean"}):
        decays = [(0.1, 16), (0.0, 5)]  # norms have none
        assert found == [
            ("AdamW", [False, False], [False, False], decays),
            ("AdamOffloadOptimizer", [True, True], [False, False], decays),
            ("SGD", [True, False], [True, False], decays),
        ]


def with_own_optimizer(folder: str) -> Any:
    with accelerate_forgets():
        arguments = bmt_hf.TrainingArguments(folder, use_cpu=True, **{**SETTINGS, "max_steps": 6})
        model = BMTrainModelWrapper(model_of())
        optimizer = AdamW(param_groups(model, weight_decay=0.1), lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = {"train_dataset": rows(48), "data_collator": padded}
        trainer = bmt_hf.Trainer(model, arguments, optimizers=(optimizer, scheduler), **data)
        found = trained(trainer)
        assert trainer.optimizer is optimizer and trainer.callback_handler.optimizer is optimizer
        trainer.train()  # goes on with the optimizer's states
        return (
            found,
            optimizer.state[next(iter(optimizer.state))]["step"],
            trainer.state.global_step,
        )


def test_an_optimizer_and_a_scheduler_of_the_users_are_used(tmp_path: Path) -> None:
    for found, steps, last in run_ranks(with_own_optimizer, 2, str(tmp_path), init=RUN):
        rates = [each["learning_rate"] for each in found["log"] if "learning_rate" in each]
        assert rates == pytest.approx([0.01 / n for n in range(1, 7)])
        assert int(steps) == 12 and last == 6


def new_model() -> Any:
    return model_of()


def trained_twice(folder: str) -> Any:
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"model_init": new_model})
        return [trained(trainer), trained(trainer)]


def test_model_init_makes_a_new_model_for_each_training(tmp_path: Path) -> None:
    with accelerate_forgets():
        expected = trained(plain_trainer(tmp_path, 2, {"model_init": new_model}))
    for first, second in run_ranks(trained_twice, 2, str(tmp_path), init=RUN):
        assert_same_training(first, expected)
        torch.testing.assert_close(second["log"], expected["log"], rtol=2e-5, atol=1e-7)


def with_a_nan(folder: str) -> Any:
    class Poisoned(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and bmt_core.rank() == 1:
                next(
                    p.grad for p in kwargs["model"].parameters() if p.grad is not None and p.numel()
                ).fill_(torch.nan)

    with (
        accelerate_forgets(),
        pytest.warns(RuntimeWarning) if bmt_core.rank() == 0 else accelerate_forgets(),
    ):
        trainer = bmt_trainer(folder, {"max_steps": 3, "callbacks": [Poisoned()]})
        trainer.train()
        finite = all(bool(value.isfinite().all()) for value in whole_state(trainer.model).values())
        return finite, trainer.manager.skipped_steps, trainer.state.global_step


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_with_a_warning(
    tmp_path: Path,
) -> None:
    assert run_ranks(with_a_nan, 2, str(tmp_path), init={"gradients": "mean"}) == [(True, 1, 3)] * 2


# --- what users override ---


class OwnStep(bmt_hf.Trainer):
    """Its step calls ``loss.backward()`` itself, as many users' do."""

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(
            model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
        )
        loss.backward()
        return loss.detach()


def with_own_step(folder: str) -> Any:
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"gradient_accumulation_steps": 2})
        trainer.__class__ = OwnStep
        return trained(trainer)


def in_a_run_of_sums(folder: str) -> Any:
    return trained_by_bmt(folder, {"gradient_accumulation_steps": 2})


def test_steps_of_the_users_own_and_runs_with_summed_gradients_train_alike(tmp_path: Path) -> None:
    expected = trained_plainly(tmp_path, 2, {"gradient_accumulation_steps": 2})
    for found in run_ranks(with_own_step, 2, str(tmp_path), init=None):
        assert_same_training(found, expected)
    for found in run_ranks(in_a_run_of_sums, 2, str(tmp_path), init={"gradients": "sum"}):
        assert_same_training(found, expected)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows(24))


STREAMED = {
    "train_dataset": Stream(),
    "max_steps": 8,
    "gradient_accumulation_steps": 2,
    "optim": "rmsprop",
}


def of_a_stream(folder: str) -> Any:
    return trained_by_bmt(folder, STREAMED)


def test_a_data_set_without_length_trains_as_by_the_plain_trainer(tmp_path: Path) -> None:
    expected = trained_plainly(tmp_path, 2, STREAMED)
    for found in run_ranks(of_a_stream, 2, str(tmp_path), init=RUN):
        # Eight steps of Adam amplify that the loss adds in another order.
        assert_same_training(found, expected, rtol=1e-4)


def with_noise(folder: str) -> Any:
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"neftune_noise_alpha": 5.0, "max_steps": 2})
        found = trained(trainer)
        return found, len(trainer.model.get_input_embeddings()._forward_hooks)


def test_noise_on_embeddings_is_that_of_the_plain_trainer_and_is_removed(tmp_path: Path) -> None:
    expected = trained_plainly(tmp_path, 1, {"neftune_noise_alpha": 5.0, "max_steps": 2})
    ((found, hooks),) = run_ranks(with_noise, 1, str(tmp_path), init=None)
    assert_same_training(found, expected)
    assert hooks == 0
    assert (
        expected["log"][0]["loss"]
        != trained_plainly(tmp_path, 1, {"max_steps": 2})["log"][0]["loss"]
    )


class Hub:
    """In place of the hub."""

    def __init__(self) -> None:
        self.uploads: list[list[str]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"user/{name}")

    def upload_folder(self, *, folder_path: str, **options: Any) -> None:
        self.uploads.append(sorted(path.name for path in Path(folder_path).iterdir()))


def pushed(folder: str) -> list[list[str]]:
    hub = Hub()
    with accelerate_forgets(), mock.patch("transformers.trainer.hf_api", lambda: hub):
        trainer = bmt_trainer(folder, {"max_steps": 1})
        trainer.train()
        trainer.push_to_hub()
    return hub.uploads


def test_rank_0_pushes_to_the_hub_what_all_ranks_have_saved(tmp_path: Path) -> None:
    (uploaded,), nothing = run_ranks(pushed, 2, str(tmp_path), init=RUN)
    assert {"README.md", "config.json", "model.safetensors.index.json"} <= set(
        uploaded
    ) and nothing == []


def ended(folder: str) -> bool:
    trainer = bmt_trainer(folder, {"max_steps": 1})
    trainer.train()
    trainer.end()
    return bmt_core.is_initialized() or torch.distributed.is_initialized()


def test_end_ends_the_run(tmp_path: Path) -> None:
    assert run_ranks(ended, 2, str(tmp_path), init=None) == [False, False]
