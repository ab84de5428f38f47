"""Buffers that forward computes from a rank's own data: rank 0's are those of all ranks at the next
call and in every file, as in DistributedDataParallel.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bmtrain as bmt
from bmt_core.comm import all_gather_object
from bmt_core.run.runtime import current
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import on_ranks


class Counted(nn.Module):
    """A linear layer with a moving average of its inputs, as of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("codebook", torch.zeros(2, 6))
        self.codebook: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.codebook.lerp_(x.mean(0).expand(2, 6), 0.5)
        out: torch.Tensor = self.linear(x) + self.codebook.mean(0)
        return out


class Declared(Counted):
    written_buffers = ("codebook",)


class Net(nn.Module):
    def __init__(self, kind: type[Counted] = Declared) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), kind()) for _ in range(2)
        )
        self.last = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.last(x)
        return out


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + bmt.rank())
    return torch.randn(8, 6, generator=generator) + bmt.rank()


def steps(model: nn.Module, first: int, last: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluated(model: nn.Module) -> list[float]:
    """The loss of the same data on each rank."""
    model.eval()
    with torch.no_grad():
        loss = model(torch.linspace(-1, 1, 48).view(8, 6)).square().mean().item()
    model.train()
    return all_gather_object(loss, current().world)


@on_ranks(2, init={"gradients": "mean"})
@pytest.mark.parametrize("recomputes", [False, True])
def test_ranks_train_and_evaluate_with_the_buffers_of_rank_0_as_in_ddp(recomputes: bool) -> None:
    ddp = DistributedDataParallel(Net())
    model = Net()
    for layer in model.layers:
        bmt.Block(layer, use_checkpoint=recomputes)
    bmt.BMTrainModelWrapper(model)
    for first in (0, 3):
        torch.testing.assert_close(steps(model, first, first + 3), steps(ddp, first, first + 3))
        losses = evaluated(model)
        assert len(set(losses)) == 1
        torch.testing.assert_close(losses, evaluated(ddp))


@on_ranks(2, init={"gradients": "mean"})
def test_a_load_changes_no_buffer_and_the_training_goes_on_as_without(tmp_path: Path) -> None:
    model = bmt.BMTrainModelWrapper(Net())
    steps(model, 0, 2)
    bmt.save_checkpoint(str(tmp_path), model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    bmt.load_checkpoint(str(tmp_path), model)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    fresh = bmt.BMTrainModelWrapper(Net())
    bmt.load_checkpoint(str(tmp_path), fresh)
    assert steps(model, 2, 4) == steps(fresh, 2, 4)


@on_ranks(2, init={"gradients": "mean"})
def test_a_save_names_a_buffer_that_differs_and_is_not_declared(tmp_path: Path) -> None:
    model = bmt.BMTrainModelWrapper(Net(Counted))
    for block in model.layers:
        block.gradient_checkpointing = False  # a recomputed forward would raise
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bmt.save(model, str(tmp_path / "model.pt"))
        assert not caught
        steps(model, 0, 1)
        for _ in range(2):
            bmt.save(model, str(tmp_path / "model.pt"))
    said = [str(warning.message) for warning in caught]
    assert len(said) == (bmt.rank() == 0)
    for text in said:
        assert "layers.0.2.codebook, layers.1.2.codebook." in text
        assert "written_buffers = ('codebook',)" in text


@on_ranks(2, init={"gradients": "mean"})
def test_nothing_is_sent_for_norms_in_evaluation_or_without_statistics() -> None:
    model = bmt.BMTrainModelWrapper(
        nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)])
    )
    sent = []
    group = current().topology.group(("dp", "replica"))
    broadcast, group.broadcast = group.broadcast, lambda *args: sent.append(1) or broadcast(*args)  # type: ignore[method-assign, func-returns-value, assignment]
    model.eval()
    for _ in range(2):
        model[0](model[1](batch(0)))
    assert not sent
    model.train()
    model[0](batch(0))
    model.eval()
    model[0](batch(0)), model[0](batch(0))
    assert len(sent) == 2  # statistics and the count, once


class Piped(PipelineModel):
    """Writes buffers before the layers on stages and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Sequential(Declared(), nn.BatchNorm1d(6)), nn.BatchNorm1d(6)
        self.layers = PipelineTransformerBlockList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def before_layers(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(inputs[0])
        return out

    def after_layers(self, *hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(hidden[0] + 1)
        return out


@on_ranks(4, init={"pipe_size": 2, "gradients": "mean"})
def test_stages_have_the_buffers_that_a_step_writes_outside_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, last = nn.Sequential(Declared(), nn.BatchNorm1d(6)), nn.BatchNorm1d(6)
    linear = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = bmt.BMTrainModelWrapper(Piped())
    pipeline, path = current().topology.axis_rank("dp"), str(tmp_path / "model.pt")
    for step in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + pipeline))
        train_step(model, nn.functional.mse_loss, (x, x), num_micro_batches=2)
        of_first = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step))
        for rows in of_first.chunk(2):
            last(linear(first(rows)) + 1)
    bmt.save(model, path)
    wanted = {f"first.{name}": b for name, b in first.named_buffers()}
    wanted |= {f"last.{name}": b for name, b in last.named_buffers()}
    saved = torch.load(path)
    torch.testing.assert_close({name: saved[name] for name in wanted}, wanted)
    for _ in range(2):  # a training call of the model, on each rank's rows, and a look at the same
        own = {name: b.clone() for name, b in model.named_buffers()}
        assert all_gather_object(str(own), current().world) == [str(own)] * 4
        model(batch(0))
        model.eval()(batch(0))
        model.train()
