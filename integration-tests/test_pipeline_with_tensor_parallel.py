"""Stages of a pipeline, each of which several ranks compute together (pp x tp), against the dense
model in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_trainings import STEPS, Record, compare, expected, text
from torch import nn
from tp_models import FEATURES, VOCABULARY, Layer, Net, fill, gradients_of, tp

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import run_ranks
from bmt_tp import ColumnParallelLinear, VPEmbedding
from bmt_zero import BMTrainModelWrapper
from bmtrain.loss import FusedCrossEntropy

BATCH, DTYPE = 4, torch.float64


class Piped(PipelineModel):
    """``tp_models.Net``, of ids (batch, sequence)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VPEmbedding(VOCABULARY, FEATURES, dtype=DTYPE)
        self.layers = PipelineTransformerBlockList([lambda: Layer(DTYPE)] * 2, batch_dim=1)

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        index, size = tp()
        embedded: torch.Tensor = self.table(ids.t().chunk(size)[index])
        return embedded

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(hidden, projection=True).transpose(0, 1)
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = FusedCrossEntropy(parallel=True)(logits.flatten(0, 1), targets.flatten())
    return loss


def trained(schedule: str | None) -> Record:
    model = Piped()
    whole = fill(Net(DTYPE))
    model.load_state_dict({name: whole[name] for name, _ in model.named_parameters()})
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    topology = current().topology
    losses, gradients = [], []
    for ids, targets in zip(*text(BATCH), strict=True):
        manager.zero_grad()
        if schedule is None:
            own_ids, own_targets = [
                part.chunk(topology.data_size)[topology.data_rank] for part in (ids, targets)
            ]
            loss = loss_of(model(own_ids), own_targets)
            manager.backward(loss)
        else:
            loss = train_step(model, loss_of, (ids, targets), schedule, 4, manager=manager)
        gradients.append(gradients_of(model))
        losses.append(float(all_reduce(loss.detach(), "avg")))
        manager.step()
    records: list[Any] = all_gather_object((gradients, dict(model.state_dict())), current().world)
    joined = [
        {k: v for other, _ in records for k, v in other[step].items()} for step in range(STEPS)
    ]
    return losses, joined, {k: v for _, state in records for k, v in state.items()}


@pytest.mark.parametrize("schedule", [None, "1f1b", "zero-bubble"])
def test_stages_of_parallel_layers_train_as_the_dense_model(schedule: str | None) -> None:
    wanted = expected(DTYPE, "sgd", BATCH)
    for found in run_ranks(
        trained, 4, schedule, init={"pipe_size": 2, "tp_size": 2, "timeout": 30}, timeout=100
    ):
        compare(found, wanted, 1e-6)


class Half(PipelineModel):
    """Parallel layers on the first stage only, if anywhere."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        first = (
            ColumnParallelLinear(FEATURES, FEATURES) if is_split else nn.Linear(FEATURES, FEATURES)
        )
        self.layers = PipelineTransformerBlockList([first, nn.Linear(FEATURES, FEATURES)])

    def before_layers(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def wrapped(is_split: bool) -> str:
    try:
        return type(BMTrainModelWrapper(Half(is_split))).__name__
    except ConfigError as error:
        return str(error)


def test_a_model_is_wrapped_if_one_stage_has_split_layers_and_refused_if_none_has() -> None:
    init = {"pipe_size": 2, "tp_size": 2}
    assert run_ranks(wrapped, 4, True, init=init) == ["Half"] * 4
    for message in run_ranks(wrapped, 4, False, init=init):
        assert message.startswith(
            "The 2 ranks along 'tp' see the same data, and no parameter of Half is split"
        )
