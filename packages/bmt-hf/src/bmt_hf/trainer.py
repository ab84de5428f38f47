"""``Trainer``: ``transformers.Trainer`` whose model is sharded by bmt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import IterableDatasetShard
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
    align_special_tokens,
    enable_full_determinism,
    set_seed,
)

from bmt_checkpoint import lock_checkpoints, save
from bmt_core import rank, shutdown
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.user_warnings import warn_user
from bmt_hf import checkpoints
from bmt_hf.arguments import ADAMW, TrainingArguments
from bmt_hf.counted_loss import reads_count
from bmt_hf.last_batch import first_rows, loss_of_rows, own_rows
from bmt_hf.linear_cross_entropy import logits_kept, use_linear_cross_entropy, why_not
from bmt_hf.model import check_model, set_recomputation, wrapped
from bmt_hf.training_loop import TrainingLoop
from bmt_optim import AdamOffloadOptimizer, AdamW, OptimManager


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` for sharded models, on any number of ranks.

    Callbacks, logging, evaluation, prediction, data loaders, losses, learning rates and nearly all
    arguments are those of transformers. Sharding, reduction and accumulation of gradients,
    clipping, the optimizer, checkpoints and resuming are bmt's. The results are those of the plain
    Trainer on one process with the same global batch. ``args`` must be
    :class:`bmt_hf.TrainingArguments`, made before the model. A plain model is wrapped in place,
    with rank 0's values; one on the meta device is initialised part by part.

    Every rank makes the same calls: ``train``, ``evaluate``, ``predict``, ``save_model`` and
    ``push_to_hub`` are collective.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    gather_function: Any
    loss_is_scaled_for_ga: bool | None
    manager: OptimManager | None = None
    """The manager of the training under way, or of the last one."""
    _reads_count: bool | None = None  # whether losses depend on num_items_in_batch, if known
    _is_counted = False  # whether the last loss was divided by it

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *others: Any, **options: Any
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise ConfigError(
                "args must be bmt_hf.TrainingArguments, not"
                f" {type(args).__module__}.{type(args).__name__}: from bmt_hf import"
                " TrainingArguments, and make them before the model."
            )
        if model is not None:
            check_model(model)
        # By name if possible: a class between this one and transformers' may have other places.
        if others:
            super().__init__(model, args, *others, **options)
        else:
            super().__init__(model=model, args=args, **options)
        if args.offload_optimizer and (
            self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        ):
            raise ConfigError(
                "offload_optimizer=True makes an optimizer, and you give one, too. Leave one of"
                " them out; bmt_optim.AdamOffloadOptimizer is the one that it makes."
            )
        self.model = self.model_wrapped = self._prepared(self.model)
        self._given_scheduler = self.lr_scheduler

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, and return the number of steps, the mean loss and the metrics. Collective.

        ``resume_from_checkpoint`` is a ``checkpoint-N``, or True for the last one in
        ``output_dir``; on as many ranks as it was saved by, training goes on as if it had never
        stopped. While another run saves to ``output_dir``, this one, if it saves, is refused.
        Raises :class:`ConfigError` and :class:`CheckpointError` on all ranks.
        """
        if trial is not None:
            raise self._no_search()
        if self.args.save_strategy != SaveStrategy.NO:
            lock_checkpoints(self.args.output_dir)
        if self.model_init is not None:
            self._make_model_anew()
        set_recomputation(
            self.model,
            self.args.activation_checkpointing,
            self.args.activation_checkpointing_kwargs or {},
        )
        if isinstance(
            self.processing_class,
            (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin),
        ) and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)
        self.lr_scheduler = self._given_scheduler
        checkpoint = None
        if resume_from_checkpoint:
            checkpoint = checkpoints.find(resume_from_checkpoint, self.args.output_dir)
        self.is_in_train = True
        alpha = self.neftune_noise_alpha
        noise = None if alpha is None else activate_neftune(self.model, alpha, self.accelerator)
        try:
            loop = TrainingLoop(self, ignore_keys_for_eval)
            self.manager = loop.manager
            return loop.run(checkpoint)
        finally:
            if noise is not None:
                deactivate_neftune(self.model, noise, self.accelerator)
            self.is_in_train = False

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """See transformers' Trainer. A loss that does not depend on ``num_items_in_batch`` is the
        mean of a micro-batch: its mean over micro-batches and ranks is trained.
        """
        compute: Any = super().compute_loss
        # Another class's compute_loss says itself what it does: loss_is_scaled_for_ga.
        is_transformers = compute.__func__ is transformers.Trainer.compute_loss
        if num_items_in_batch is not None and self._reads_count is None and is_transformers:

            def loss_for(number: torch.Tensor) -> Any:
                return compute(model, dict(inputs), num_items_in_batch=number)

            self._reads_count = reads_count(model, loss_for, num_items_in_batch)
        if self._reads_count is False:
            num_items_in_batch, self.model_accepts_loss_kwargs = None, False
            if self.loss_is_scaled_for_ga is None:
                self.loss_is_scaled_for_ga = False
        self._is_counted = num_items_in_batch is not None
        return compute(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """See transformers' Trainer. Collective."""
        if isinstance(getattr(dataloader, "dataset", None), IterableDatasetShard):
            warn_user(
                "The evaluation data has no length, and dispatch_batches=False has each rank read"
                " it: rows that fill the last batch up count again, in the loss and in metrics."
                " Leave dispatch_batches out of accelerator_config, or give data with a length."
            )
        # Seq2SeqTrainer gathers the rows that fill the last batch up, too.
        if self.gather_function == self.accelerator.gather:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(dataloader, *arguments, **options)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> Any:
        """See transformers' Trainer. Of the last batch, which is filled up with rows from the
        beginning, the loss is that of all ranks' own rows. Collective.
        """
        with logits_kept(model, not prediction_loss_only):
            return self._prediction(model, inputs, prediction_loss_only, ignore_keys, options)

    def _prediction(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None,
        options: dict[str, Any],
    ) -> Any:
        rows = own_rows(inputs, self.args.eval_batch_size)
        found = None, None, None
        if rows is None or not prediction_loss_only:
            found = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **options
            )
        if rows is None:
            return found
        loss, _, _ = super().prediction_step(
            model,
            first_rows(inputs, rows, self.args.eval_batch_size),
            True,
            ignore_keys=ignore_keys,
            **options,
        )
        if loss is not None:
            is_counted = self._is_counted and self.args.average_tokens_across_devices
            loss = loss_of_rows(loss, rows, is_counted=is_counted)
        return loss, *found[1:]

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return bmt's AdamW for ``adamw_torch`` and ``adamw_torch_fused``, on the host if asked;
        else transformers' choice.
        """
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        if args.optim not in ADAMW:
            return kind, options
        options.pop("fused", None)
        if args.offload_optimizer:
            options["decoupled_weight_decay"] = True
        # Callbacks read parameters after a step.
        options["overlap_forward"] = False
        return (AdamOffloadOptimizer if args.offload_optimizer else AdamW), options

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads: the model, or PEFT's adapters, with configuration
        and tokenizer. Collective.

        All ranks write to ``output_dir``, by default that of the arguments, which they share.
        """
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        with collective_section(current().world, f"saving {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
        processing = self.processing_class
        if processing is None:
            processing = getattr(self.data_collator, "tokenizer", None)
        save(self.model, f"{directory}/")
        with collective_section(current().world, f"saving {directory}"):
            if rank() == 0:
                if processing is not None:
                    processing.save_pretrained(str(directory))
                torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        """Refused: a search makes a new trainer for each trial."""
        raise self._no_search()

    def end(self) -> None:
        """Finish trackers and end the run."""
        shutdown()
        super().end()

    def _make_model_anew(self) -> None:
        """Call ``model_init`` for each training, as the plain Trainer does."""
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        else:
            set_seed(self.args.seed)
        self.model = self.model_wrapped = self._prepared(self.call_model_init())
        self.optimizer = None

    def _prepared(self, model: Any) -> Any:
        """Return ``model`` sharded, and without logits in training if nobody else may read them."""
        model = wrapped(model)
        others: Any = super().compute_loss
        computes_loss = others.__func__ is transformers.Trainer.compute_loss
        if computes_loss and type(self).compute_loss is Trainer.compute_loss and not why_not(model):
            use_linear_cross_entropy(model)
        return model

    @staticmethod
    def _no_search() -> ConfigError:
        return ConfigError(
            "bmt_hf.Trainer searches no hyperparameters: ranks would have to agree on each trial."
            " Start a run for each set of them, with other arguments."
        )
