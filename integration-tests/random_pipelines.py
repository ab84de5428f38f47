"""Trainings drawn at random whose layers lie on the stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from parallel_parts import parallelize
from random_models import LENGTH, Model, extras_of
from random_plans import Plan, StepPlan
from random_trainings import IGNORED, ShardedTraining
from torch import nn

from bmt_core.errors import RemoteError
from bmt_core.run import runtime
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, eval_step, train_step
from bmt_pipeline.pipeline_ranks import pipeline_group
from bmt_zero import Block, BMTrainModelWrapper


class PipelinedModel(PipelineModel):
    """``random_models.Model``, with its layers divided over stages. Nothing leaves them on
    the side.
    """

    aux = 0.0
    options = Model.options

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        assert plan.pipeline is not None
        self.embedding, self.pipeline = model.embedding, plan.pipeline
        self.is_sequence_first = plan.pipeline.layout != "batch first"
        for layer in model.layers:
            layer.is_sequence_first = self.is_sequence_first  # type: ignore[assignment]
        self.layers = PipelineTransformerBlockList(
            [_member(layer, plan, index) for index, layer in enumerate(model.layers)],
            chunks=plan.pipeline.chunks,
            placement=plan.pipeline.placement,
            costs=plan.pipeline.costs,
            batch_dim=int(self.is_sequence_first),
            batch_related=[0] if plan.pipeline.extras else None,
        )
        self.norm, self.head = model.norm, model.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of ``tokens``, which are (batch, positions) in any layout."""
        logits: torch.Tensor = super().forward(tokens.t() if self.takes_transposed else tokens)
        return logits

    @property
    def takes_transposed(self) -> bool:
        """Whether :meth:`before_layers` takes tokens (positions, batch)."""
        return self.pipeline.layout == "all sequence first"

    def before_layers(self, tokens: torch.Tensor) -> tuple[Any, ...]:
        tokens = tokens.t() if self.takes_transposed else tokens
        embedded: torch.Tensor = self.embedding(tokens)
        extras = extras_of(self, tokens) if self.pipeline.extras else ()
        return embedded.transpose(0, 1) if self.is_sequence_first else embedded, *extras

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(
            self.norm(hidden.transpose(0, 1) if self.is_sequence_first else hidden)
        )
        return logits


class PipelinedTraining(ShardedTraining):
    """The same by the ranks of this run, of which each has the layers of a stage."""

    def build(self, model: Model) -> nn.Module:
        """Return the model with the layers of this stage."""
        self.places = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        if self.plan.tp > 1:
            parallelize(
                model,
                runtime.current().topology.axis_size("tp"),
                random.Random(f"parts {self.plan.seed}"),
                whole=False,
            )
        return BMTrainModelWrapper(PipelinedModel(model, self.plan), keep=self.keep())

    def numbers(self) -> Iterable[tuple[int, nn.Parameter]]:
        """Return the parameters of this stage with their numbers in the plain model."""
        return [(self.places[name], parameter) for name, parameter in self.named]

    def layers(self) -> Iterable[tuple[int, Any]]:
        """Return the layers of this stage with their numbers."""
        return zip(self.model.layers.layer_ids, self.model.layers, strict=True)

    def middle_layers(self) -> list[nn.Module]:
        """Return the layer in the middle, if this stage has it."""
        middle = len(self.model.layers) // 2
        return [layer for index, layer in self.layers() if index == middle]

    def fail(self, number: int, where: str) -> None:
        """Begin a step that fails on one stage."""
        with suppress(RemoteError):
            super().fail(number, where)

    def logits(self, tokens: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
        """Return what the model makes of ``tokens``: all layers."""
        logits: torch.Tensor = self.model(tokens)
        return logits

    def loss(self, step: int, micro: int, order: Iterable[int]) -> torch.Tensor:
        """Return the loss; by a schedule, its gradients are there already."""
        assert self.plan.pipeline is not None
        schedule, evaluates = self.plan.pipeline.schedule, not torch.is_grad_enabled()
        if schedule is None or (evaluates and self.plan.pipeline.evaluates_by == "model"):
            return super().loss(step, micro, order)
        ranks, model = pipeline_group().ranks, self.model
        batch = [
            torch.cat([of(step, micro, rank) for rank in ranks])
            for of in (self.tokens, self.targets)
        ]
        if model.takes_transposed:
            batch = [part.t() for part in batch]
        count = self.plan.micro_batches(self.world_size, step)
        options: dict[str, Any] = {
            "num_micro_batches": count,
            "batch_dim": int(model.takes_transposed),
        }
        # Else what the batch is would be a guess.
        if not model.is_sequence_first or len(batch[0]) // count != LENGTH:
            options["batch_dim"] = options["batch_dim"] or None
        if self.counts:
            options["count_fn"] = lambda targets: (targets != IGNORED).sum()

        def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            targets = (targets.t() if model.takes_transposed else targets).flatten()
            return (self.sum_of_tokens if self.counts else self.loss_of_tokens)(
                logits.flatten(0, 1), targets
            )

        if evaluates and self.plan.pipeline.evaluates_by == "eval_step":
            loss = eval_step(model, loss_fn, tuple(batch), **options)  # type: ignore[arg-type]
        else:
            options["manager"] = self.manager if self.plan.manages else None
            loss = train_step(model, loss_fn, tuple(batch), schedule, **options)  # type: ignore[arg-type]
        # As if each rank had the same share of the sum.
        whole = self.count(step, [micro]) / self.world_size
        return loss.nan_to_num() * whole if self.counts and self.plan.manages else loss

    def backward(self, loss: torch.Tensor, plan: StepPlan, micro: int) -> None:
        """Run backward, unless the schedule has."""
        if loss.requires_grad:
            super().backward(loss, plan, micro)

    def overflow(self) -> None:
        """Take a step with infinite gradients: none."""
        skipped = self.manager.skipped_steps
        tokens = self.tokens(0, 0, runtime.rank())
        self.manager.backward(
            self.model(tokens).sum() * float("inf"), count=1 if self.counts else None
        )
        self.manager.step()
        self.manager.read_outcome()
        assert self.manager.skipped_steps == skipped + 1
        self.manager.zero_grad()


def _member(layer: nn.Module, plan: Plan, index: int) -> Any:
    """Return what the list gets for a layer."""
    assert plan.pipeline is not None
    if plan.pipeline.members == "modules":
        return layer
    b = plan.blocks[index]

    def block() -> nn.Module:
        return Block(
            layer,
            b.recomputes,
            b.level,
            reduce_dtype=b.reduce_dtype,
            mode="PIPE",
            shard_size=b.shard_size,
        )

    # Parallel layers were made by all stages, so all stages take part in cutting them anew.
    return block if plan.pipeline.members == "factories" and plan.tp == 1 else block()
