"""``TrainingLoop``: one call of ``Trainer.train``, from the first batch to the last callback."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import skip_first_batches
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
    compare_trainer_and_checkpoint_args,
    speed_metrics,
)

from bmt_checkpoint.random_state import data_rank_and_grid, random_states, restore_random_states
from bmt_core.errors import ConfigError
from bmt_core.user_warnings import warn_user
from bmt_hf import checkpoints
from bmt_hf.data_order import set_order
from bmt_hf.running_loss import RunningLoss
from bmt_hf.transformers_internals import (
    count_input_tokens,
    note_tokens_before,
    restore_callbacks,
    scale_losses_by,
)
from bmt_optim import OptimManager
from bmt_zero import no_sync


class Lengths(NamedTuple):
    """What ``Trainer.set_initial_training_values`` returns, in its order."""

    num_epochs: int
    updates_per_epoch: int
    num_examples: int
    num_samples: float
    batch_size: int
    batches_per_epoch: int
    max_steps: int


class TrainingLoop:
    """Trains the model of ``trainer`` once. It tells the callbacks what the plain Trainer tells
    them, in the same order.

    All that users override or replace is the trainer's: its loaders, ``training_step``,
    ``compute_loss``, ``evaluate``, ``log``, ``save_model``, callbacks, ``state`` and ``control``.
    """

    def __init__(self, trainer: Any, ignore_keys_for_eval: list[str] | None) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self._ignore_keys = ignore_keys_for_eval
        trainer.accelerator.free_memory()
        self._loader = trainer.get_train_dataloader()
        self._lengths = Lengths(*trainer.set_initial_training_values(self.args, self._loader))
        trainer.create_optimizer()
        # Applies autocast for bf16 and fp16, and nothing else.
        self._model = trainer.accelerator.prepare_model(
            trainer.model, device_placement=False, evaluation_mode=True
        )
        trainer.model_wrapped = self._model
        trainer.create_scheduler(num_training_steps=self._lengths.max_steps)
        self._scales_losses = self.args.mixed_precision == "fp16"
        # The numbers of torch's GradScaler.
        self.manager = (
            OptimManager(loss_scale=2**16, loss_scale_steps=2000)
            if self._scales_losses
            else OptimManager()
        )
        self.manager.add_optimizer(trainer.optimizer)
        scale_losses_by(trainer, self.manager)
        self._learning_rate: float | None = None
        self._grad_norm: torch.Tensor | None = None
        self._batches_done = 0  # of this epoch
        self._saved_random: dict[str, Any] | None = None  # restored when the data is where it was
        self._order: torch.Tensor | None = None  # what the order of this epoch was drawn from

    def run(self, checkpoint: Path | None) -> TrainOutput:
        """Train from the beginning, or from ``checkpoint``; return the number of steps and the
        mean loss.
        """
        trainer, lengths = self.trainer, self._lengths
        first_epoch, skipped_batches = self._begin_state(checkpoint)
        if checkpoint is not None:
            self._order = checkpoints.restore(trainer, self.manager, checkpoint)
            self._saved_random = random_states()
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = (
            trainer.model,
            trainer.optimizer,
            trainer.lr_scheduler,
        )
        handler.train_dataloader = self._loader
        self._start_time, self._first_step = time.time(), trainer.state.global_step
        note_tokens_before(trainer)
        self._loss = RunningLoss(
            self.args.device, self._first_step, skip_non_finite=self.args.logging_nan_inf_filter
        )
        self._model.zero_grad()
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            trainer.evaluate(ignore_keys=self._ignore_keys)
        for epoch in range(first_epoch, lengths.num_epochs):
            self._tell("on_epoch_begin")
            self._run_epoch(epoch, skipped_batches if epoch == first_epoch else 0)
            if trainer.control.should_training_stop:
                break
        return self._end()

    def _begin_state(self, checkpoint: Path | None) -> tuple[int, int]:
        """Set ``trainer.state``; return the epoch to begin with, and how many of its batches
        are done.
        """
        trainer, args, lengths = self.trainer, self.args, self._lengths
        state = TrainerState(stateful_callbacks=checkpoints.exportable(trainer))
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, lengths.max_steps)
        trainer.state = state
        epoch = batches = 0
        if checkpoint is not None:
            trainer.state = state = TrainerState.load_from_json(
                str(checkpoint / TRAINER_STATE_NAME)
            )
            best = state.best_model_checkpoint
            if best is not None and not Path(best, checkpoints.TRAINING).is_dir():
                warn_user(
                    f"The best checkpoint so far, {best}, is not there any more; the best one from"
                    " now on counts."
                )
                state.best_model_checkpoint = None
            compare_trainer_and_checkpoint_args(args, state)
            restore_callbacks(trainer)
            epoch, updates = divmod(state.global_step, lengths.updates_per_epoch)
            batches = updates * args.gradient_accumulation_steps
            has_length = lengths.num_epochs < sys.maxsize
            if not has_length:
                # Its epochs end before they have as many batches as the training, by which
                # ``state.epoch`` counts.
                epoch = int(state.epoch)
                batches = round(
                    (state.epoch - epoch) * state.max_steps * args.gradient_accumulation_steps
                )
            done = lengths.batches_per_epoch * (state.epoch - epoch)
            if args.ignore_data_skip:
                batches = 0
            elif has_length and abs(done - batches) > 0.5:
                warn_user(
                    f"{checkpoint} was saved after {state.epoch:.3f} epochs, and a training with"
                    f" this batch has made its {state.global_step} steps after"
                    f" {epoch + batches / lengths.batches_per_epoch:.3f}, where it goes on: some"
                    " rows are seen twice or not at all. Keep the product of ranks,"
                    " per_device_train_batch_size and gradient_accumulation_steps."
                )
        state.init_training_references(trainer, lengths.max_steps, lengths.num_epochs, None)
        return epoch, batches

    def _run_epoch(self, epoch: int, skipped_batches: int) -> None:
        trainer, lengths, accumulated = (
            self.trainer,
            self._lengths,
            self.args.gradient_accumulation_steps,
        )
        batches = self._batches_of(epoch, skipped_batches)
        self._batches_done = skipped_batches
        self._grad_norm = self._learning_rate = None
        last_count = lengths.batches_per_epoch % accumulated or accumulated
        for update in range(skipped_batches // accumulated, lengths.updates_per_epoch):
            count = last_count if update == lengths.updates_per_epoch - 1 else accumulated
            micro_batches, num_items = trainer.get_batch_samples(batches, count, self.args.device)
            self._restore_random()
            trainer.current_gradient_accumulation_steps = len(micro_batches)
            self._run_update(epoch, micro_batches, num_items)
            if self._should_stop():
                break
        if self._batches_done == 0:
            warn_user(
                f"The training data gave no batch in epoch {epoch}; training stops after"
                f" {trainer.state.global_step} of {trainer.state.max_steps} steps."
            )
            trainer.control.should_training_stop = True
        self._tell("on_epoch_end")
        self._log_evaluate_save()

    def _batches_of(self, epoch: int, skipped: int) -> Iterator[Any]:
        """Return an iterator over the batches of ``epoch`` without the first ``skipped``."""
        loader: Any = self._loader
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        # Before skip_first_batches, behind whose loader the sampler of several ranks is out
        # of reach.
        for each in (loader, sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        if not skipped:
            self._restore_random()
        self._order = set_order(loader, self._order if skipped else None)
        return iter(skip_first_batches(loader, skipped) if skipped else loader)

    def _run_update(
        self, epoch: int, micro_batches: list[Any], num_items: torch.Tensor | int | None
    ) -> None:
        """Compute the gradients of ``micro_batches``, and take a step after the last one."""
        trainer, accumulated = self.trainer, self.args.gradient_accumulation_steps
        for inputs in micro_batches:
            if self._batches_done % accumulated == 0:
                self._tell("on_step_begin")
            self._batches_done += 1
            is_last = (
                self._batches_done % accumulated == 0
                or self._batches_done == self._lengths.batches_per_epoch
            )
            with nullcontext() if is_last else no_sync(trainer.model):
                loss = trainer.training_step(self._model, inputs, num_items)
            self._loss.add(loss, trainer.state.global_step)
            trainer.current_flos += float(trainer.floating_point_ops(inputs))
            count_input_tokens(trainer, inputs)
            if is_last:
                self._step(epoch)
            else:
                self._tell("on_substep_end")
            if self._should_stop():
                return

    def _step(self, epoch: int) -> None:
        trainer, state = self.trainer, self.trainer.state
        max_norm = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        self._grad_norm = self.manager.clip_grad_norm(list(trainer.model.parameters()), max_norm)
        self._tell("on_pre_optimizer_step")
        was_skipped = self._step_optimizer()
        self._tell("on_optimizer_step")
        self._learning_rate = self._current_learning_rate()
        if not was_skipped and not self._scheduler_needs_metrics():
            trainer.lr_scheduler.step()
        self.manager.zero_grad()
        self._model.zero_grad()
        state.global_step += 1
        state.epoch = epoch + self._batches_done / self._lengths.batches_per_epoch
        self._tell("on_step_end")
        self._log_evaluate_save()

    def _step_optimizer(self) -> bool:
        """Take a step; return whether loss scaling has skipped it, in which case the scheduler is
        not stepped either.
        """
        before = self.manager.skipped_steps
        self.manager.step()
        if not self._scales_losses:
            return False
        self.manager.read_outcome()
        return self.manager.skipped_steps > before

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        step = trainer.state.global_step
        if trainer.control.should_log and step > self._loss.last_step:
            logs = {"loss": self._loss.mean(step)}
            if self._grad_norm is not None:
                logs["grad_norm"] = self._grad_norm.item()
            rate = self._learning_rate
            logs["learning_rate"] = self._current_learning_rate() if rate is None else rate
            trainer.store_flos()
            trainer.log(logs, self._start_time)
        if trainer.control.should_evaluate:
            is_best = self._evaluate()
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            checkpoints.save(trainer, self.manager, self._order)
            self._tell("on_save")

    def _evaluate(self) -> bool:
        """Evaluate, and step a scheduler that waits for it; return whether the metric is better
        than ever before.
        """
        trainer = self.trainer
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys)
        if self._scheduler_needs_metrics():
            trainer.lr_scheduler.step(self._metric(metrics))
        if self.args.metric_for_best_model is None:
            return False
        value, best, greater = (
            self._metric(metrics),
            trainer.state.best_metric,
            self.args.greater_is_better,
        )
        if best is None:
            best = trainer.state.best_metric = -math.inf if greater else math.inf
        if not (value > best if greater else value < best):
            return False
        trainer.state.best_metric = value
        if self.args.save_strategy != SaveStrategy.NO:
            trainer.state.best_global_step = trainer.state.global_step
        return True

    def _metric(self, metrics: dict[str, float]) -> float:
        """Return the metric that ``metric_for_best_model`` names."""
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"metric_for_best_model is {self.args.metric_for_best_model!r}, and the evaluation"
                f" gave {', '.join(sorted(metrics))}. Name one of them, or have compute_metrics"
                " return it."
            )
        return metrics[name]

    def _end(self) -> TrainOutput:
        trainer = self.trainer
        steps = trainer.state.global_step - self._first_step
        mean_loss = self._loss.mean_of_all(trainer.state.global_step)
        trained = self._lengths.num_samples * steps / max(trainer.state.max_steps, 1)
        metrics = speed_metrics("train", self._start_time, num_samples=trained, num_steps=steps)
        trainer.store_flos()
        metrics["total_flos"] = trainer.state.total_flos
        metrics["train_loss"] = mean_loss
        trainer.log(metrics)
        if self.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            checkpoints.load_best(trainer)
        checkpoints.finish(trainer)
        self._tell("on_train_end")
        return TrainOutput(trainer.state.global_step, mean_loss, metrics)

    def _tell(self, event: str) -> None:
        """Call ``event`` of all callbacks, which may return another control."""
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(
            self.args, trainer.state, trainer.control
        )

    def _should_stop(self) -> bool:
        control = self.trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def _current_learning_rate(self) -> float:
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    def _scheduler_needs_metrics(self) -> bool:
        return isinstance(self.trainer.lr_scheduler, (ReduceLROnPlateau, GreedyLR))

    def _restore_random(self) -> None:
        """After a checkpoint was loaded, restore the random states once more: finding the place in
        the data has drawn numbers.
        """
        if self._saved_random is not None:
            grid = data_rank_and_grid()
            restore_random_states([self._saved_random], [grid], 0, [grid])
            self._saved_random = None
