"""Trainings drawn at random whose layers lie on the stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from parallel_parts import parallelize
from random_models import Model
from random_plans import Plan, StepPlan
from random_trainings import ShardedTraining
from torch import nn

from bmt_core.errors import RemoteError
from bmt_core.run import runtime
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_pipeline.pipeline_ranks import pipeline_group
from bmt_zero import Block, BMTrainModelWrapper


class PipelinedModel(PipelineModel):
    """``random_models.Model``, with its layers divided over stages. Nothing leaves them on the side."""

    aux = 0.0

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        assert plan.pipeline is not None
        self.embedding = model.embedding
        self.layers = PipelineTransformerBlockList(
            [_member(layer, plan, index) for index, layer in enumerate(model.layers)],
            chunks=plan.pipeline.chunks,
            placement=plan.pipeline.placement,
            costs=plan.pipeline.costs,
        )
        self.norm, self.head = model.norm, model.head

    def before_layers(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(tokens)
        return embedded

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class PipelinedTraining(ShardedTraining):
    """The same by the ranks of this run, of which each has the layers of a stage."""

    def build(self, model: Model) -> nn.Module:
        """Return the model with the layers of this stage."""
        self.places = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        if self.plan.tp > 1:
            parallelize(model, runtime.current().topology.axis_size("tp"), random.Random(f"parts {self.plan.seed}"))
        return BMTrainModelWrapper(PipelinedModel(model, self.plan))

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
        schedule = self.plan.pipeline.schedule
        if schedule is None or not torch.is_grad_enabled():
            return super().loss(step, micro, order)
        tokens = [self.tokens(step, micro, rank) for rank in pipeline_group().ranks]
        return train_step(
            self.model,
            lambda logits, targets: self.loss_of_tokens(logits.flatten(0, 1), targets.flatten()),
            (torch.cat(tokens), torch.cat([of_rank.roll(1) for of_rank in tokens])),
            schedule,
            self.plan.micro_batches(self.world_size, step),
            manager=self.manager if self.plan.manages else None,
        )

    def backward(self, loss: torch.Tensor, plan: StepPlan, micro: int) -> None:
        """Run backward, unless the schedule has."""
        if loss.requires_grad:
            super().backward(loss, plan, micro)

    def overflow(self) -> None:
        """Take a step with infinite gradients: none."""
        skipped = self.manager.skipped_steps
        tokens = self.tokens(0, 0, runtime.rank())
        self.manager.backward(self.model(tokens).sum() * float("inf"))
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
        return Block(layer, b.recomputes, b.level, reduce_dtype=b.reduce_dtype, mode="PIPE")

    # Parallel layers were made by all stages, so all stages take part in cutting them anew.
    return block if plan.pipeline.members == "factories" and plan.tp == 1 else block()
