"""Dropout in the layers of a pipeline: recomputation draws the forward's numbers, and no two
micro-batches draw the same.
"""

from __future__ import annotations

from typing import Any

import torch
from pipeline_trainings import GLOBAL_BATCH, LENGTH, VOCABULARY, WIDTH, loss_of, of_pipeline, text
from torch import nn
from zero_models import full_gradient

from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import run_ranks
from bmt_zero import Block

LAYERS, MICRO_BATCHES = 5, 4  # stages of three and of two layers


class Noisy(nn.Module):
    """Keeps the masks of its forwards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks.append(mask.detach().flatten())
        out: torch.Tensor = x + mask * self.linear(x)
        return out


class Model(PipelineModel):
    def __init__(self, use_checkpoint: bool) -> None:
        super().__init__()
        torch.manual_seed(99)
        self.embedding = DistributedParameter(torch.randn(VOCABULARY, WIDTH))
        blocks = [Block(Noisy(number), use_checkpoint, mode="PIPE") for number in range(LAYERS)]
        self.layers = PipelineTransformerBlockList(blocks)

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.embedding)

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.t()


def drawn(
    schedule: str | None, use_checkpoint: bool
) -> tuple[list[list[torch.Tensor]], list[Any], int]:
    """By layer of this stage, the masks; the gradients; and a number of the user's own after
    the step.
    """
    model, topology = Model(use_checkpoint), current().topology
    torch.manual_seed(1)
    ids, targets = (part[0] for part in text())
    if schedule is None:
        ids, targets = (
            part.chunk(topology.data_size)[topology.data_rank] for part in (ids, targets)
        )
        hidden = model.before_layers(ids)
        # The list is the outermost call.
        loss = loss_of(model.after_layers(model.layers(hidden)), targets)
        OptimManager().backward(loss)
    else:
        batch: Any = of_pipeline(ids, targets)
        train_step(model, loss_of, batch, schedule, MICRO_BATCHES, manager=OptimManager())
    gradients = [full_gradient(parameter) for parameter in model.parameters()]
    layers: list[Any] = model.layers.layers()
    return [layer.masks for layer in layers], gradients, int(torch.randint(2**31, ()))


def all_drawn() -> list[Any]:
    return [
        drawn(schedule, recomputes)
        for schedule in (None, "1f1b", "zero-bubble")
        for recomputes in (False, True)
    ]


def test_recomputation_draws_what_its_forward_drew_and_others_draw_other_numbers() -> None:
    results = run_ranks(
        all_drawn, 4, init={"pipe_size": 2, "num_micro_batches": MICRO_BATCHES, "timeout": 30}
    )
    for case in range(0, 6, 2):
        masks: list[torch.Tensor] = []
        for rank in results:
            (once, gradients, number), (twice, recomputed_gradients, other_number) = rank[
                case : case + 2
            ]
            # The user's own numbers are alike on all ranks.
            assert number == other_number == results[0][case][2]
            torch.testing.assert_close(recomputed_gradients, gradients)
            for layer, again in zip(once, twice, strict=True):
                assert len(layer) == MICRO_BATCHES and len(again) == 2 * MICRO_BATCHES
                assert {tuple(mask.tolist()) for mask in again} == {
                    tuple(mask.tolist()) for mask in layer
                }
                masks += layer
        assert masks[0].numel() == GLOBAL_BATCH // 2 // MICRO_BATCHES * LENGTH * WIDTH
        assert (
            len({tuple(mask.tolist()) for mask in masks})
            == len(masks)
            == 2 * LAYERS * MICRO_BATCHES
        )
