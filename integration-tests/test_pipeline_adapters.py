"""Adapters in models whose layers lie on stages: those outside of the layers begin alike on all
stages, or are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_trainings import Bare, loss_of, outcome
from torch import nn

import bmt_checkpoint
from bmt_core.run.collectives import broadcast
from bmt_optim import AdamOptimizer, OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import train_step
from bmt_testing import on_ranks
from bmt_zero import BMTrainModelWrapper

WORDS, WIDTH, STEPS = 11, 8, 3
ADAM = {"lr": 0.02, "eps": 1e-3}


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two small matrices, as LoRA adds it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = base.weight
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=like.dtype) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=like.dtype) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Plain(nn.Module):
    """Three layers, so that two stages have different numbers of them, and after them the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH).double().requires_grad_(False)
        self.layers: Any = nn.ModuleList([Layer() for _ in range(3)])
        self.head: nn.Module = nn.Linear(WIDTH, WORDS).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Piped(Bare):
    def __init__(self, plain: Plain) -> None:
        super().__init__(list(plain.layers))
        self.embedding = plain.embedding
        self.head = plain.head

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(ids)
        return embedded

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


def adapted(model: Any) -> Any:
    """Add adapters to all linear layers, in the order of the modules that this rank has."""
    torch.manual_seed(1)
    for parent in [parent for parent in model.modules() if isinstance(parent, Layer)]:
        parent.linear = Adapted(parent.linear)
    model.head = Adapted(model.head)
    return model


def trained(form: str, file: str) -> list[float]:
    """The losses, and that of the whole model in the file."""
    model: Any = BMTrainModelWrapper(Piped(adapted(Plain()) if form == "before" else Plain()))
    if form != "before":
        adapted(model)
    if form == "sent":
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DistributedParameter) and not name.startswith("layers."):
                parameter.data.copy_(broadcast(parameter.data, 0))
    manager, losses = OptimManager(), []
    manager.add_optimizer(AdamOptimizer([p for p in model.parameters() if p.requires_grad], **ADAM))
    ids = torch.arange(8).view(4, 2)
    for _ in range(STEPS):
        manager.zero_grad()
        options: Any = {"num_micro_batches": 2, "manager": manager}
        losses.append(float(train_step(model, loss_of, (ids, ids + 1), **options)))
        manager.step()
    bmt_checkpoint.save(model, file)
    losses.append(float(loss_of(model(ids), ids + 1).detach()))
    return losses


@on_ranks(2, init={"pipe_size": 2})
def test_adapters_that_stages_have_drawn_differently_are_refused_at_the_first_step(
    tmp_path: Path,
) -> None:
    message = outcome(lambda: trained("after", str(tmp_path / "model.pt")))
    assert message.startswith("ConfigError: ordinary parameter ")
    assert "has other values on rank 1 than on rank 0" in message
    assert "before the layers are divided" in message


@on_ranks(2, init={"pipe_size": 2})
@pytest.mark.parametrize("form", ["before", "sent"])
def test_adapters_that_begin_alike_are_trained_and_saved_as_one_model(
    form: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "model.pt")
    *losses, last = trained(form, file)
    ids = torch.arange(8).view(4, 2)
    model = adapted(Plain())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], **ADAM)
    for loss in losses if form == "before" else ():
        optimizer.zero_grad()
        expected = loss_of(model(ids), ids + 1)
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        optimizer.step()
    model.load_state_dict(torch.load(file, weights_only=True))
    assert loss_of(model(ids), ids + 1).item() == pytest.approx(last, rel=1e-6)
