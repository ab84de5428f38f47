"""Trainings of a model whose layers lie on the stages of a pipeline, and of the same model in
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import full_gradient

from bmt_core.comm.objects import all_gather_object
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import run_ranks
from bmt_zero import Block

STEPS, LENGTH, WIDTH, INNER, VOCABULARY = 4, 3, 24, 25, 11
GLOBAL_BATCH = 16


class Layer(nn.Module):
    """Attention-like mixing under a mask of the batch, and a bias that all rows share."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.norm = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, shift: torch.Tensor, *, scale: float = 1.0
    ) -> torch.Tensor:
        x = torch.softmax(mask, -1) @ x + shift
        out: torch.Tensor = x + scale * self.down(torch.tanh(self.norm(self.up(x))))
        return out


class Plain(nn.Module):
    """Embedding, layers and head, with the weight of the embedding tied to that of the head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(99)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)
        self.shift = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers: Any = nn.ModuleList([Layer(number) for number in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(ids, self.embedding)
        mask = mask_of(ids).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask, self.shift)
        return x @ self.embedding.t()


class Piped(PipelineModel):
    """The same, with its layers divided over stages, in Blocks of ``level`` unless it is None."""

    def __init__(
        self,
        layers: int,
        level: int | None,
        use_checkpoint: bool,
        *,
        compile: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        super().__init__()
        plain = Plain(layers).to(dtype)
        self.embedding = DistributedParameter(plain.embedding.data)
        self.shift = DistributedParameter(plain.shift.data)
        self.layers = PipelineTransformerBlockList(
            [
                layer
                if level is None
                else Block(layer, use_checkpoint, level, mode="PIPE", compile=compile)
                for layer in plain.layers
            ],
            **options,
        )

    def before_layers(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = nn.functional.embedding(ids, self.embedding)
        return x, mask_of(ids).to(x.dtype), self.shift

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.t()


class Bare(PipelineModel):
    """Layers alone, which get what the model is called with."""

    def __init__(self, layers: Any, **options: Any) -> None:
        super().__init__()
        self.layers: Any = PipelineTransformerBlockList(layers, **options)

    def before_layers(self, *inputs: Any) -> Any:
        return inputs if len(inputs) > 1 else inputs[0]

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def outcome(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns, or the text of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def of_pipeline(*batch: torch.Tensor) -> tuple[Any, ...]:
    """Return the rows of this rank's pipeline."""
    topology, device = current().topology, current().device
    pipelines, own = topology.axis_size("dp"), topology.axis_rank("dp")
    return tuple(x.chunk(pipelines)[own].to(device) for x in batch)


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, :, None] * ids[:, None, :] % 5).float()


def text() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(VOCABULARY, (STEPS, GLOBAL_BATCH, LENGTH + 1), generator=generator)
    return data[:, :, :-1], data[:, :, 1:].clone()


Record = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def train(
    model: nn.Module, wrap: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
) -> Record:
    """Train by SGD; ``wrap`` makes the gradients of one step and returns the global mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for ids, targets in zip(*text(), strict=True):
        optimizer.zero_grad()
        losses.append(float(wrap(model, ids, targets)))
        gradients.append(whole_gradients(model))
        optimizer.step()
    return (
        losses,
        gradients,
        {name: value.cpu().clone() for name, value in model.state_dict().items()},
    )


def plain_step(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(ids), targets)
    loss.backward()
    return loss.detach()


def expected(layers: int) -> Record:
    return train(Plain(layers).double(), plain_step)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: full_gradient(p) for name, p in model.named_parameters()}
    return {name: gradient.cpu() for name, gradient in found.items() if gradient is not None}


def listed_step(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    topology, device = current().topology, current().device
    own_ids, own_targets = [
        x.chunk(topology.data_size)[topology.data_rank].to(device) for x in (ids, targets)
    ]
    loss = loss_of(model(own_ids), own_targets)
    OptimManager().backward(loss)
    return all_reduce(loss.detach(), "avg")


def listed(layers: int, level: int, use_checkpoint: bool, **options: Any) -> Record:
    record = train(
        Piped(layers, level, use_checkpoint, **options).to(current().device), listed_step
    )
    return of_all_stages(record)


def scheduled(
    layers: int, level: int, use_checkpoint: bool, schedule: str, micro_batches: int, **options: Any
) -> Record:
    def step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        batch: Any = of_pipeline(ids, targets)
        loss = train_step(model, loss_of, batch, schedule, micro_batches, manager=OptimManager())
        return all_reduce(loss, "avg")

    return of_all_stages(
        train(Piped(layers, level, use_checkpoint, **options).to(current().device), step)
    )


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_all_stages(record: Record) -> Record:
    """Join what the stages have of the model."""
    records: list[Record] = all_gather_object(record, current().world)
    gradients = [
        {k: v for other in records for k, v in other[1][step].items()}
        for step in range(len(record[1]))
    ]
    return record[0], gradients, {k: v for other in records for k, v in other[2].items()}


def compare(found: Record, wanted: Record, tolerance: float | None = None) -> None:
    """Compare the losses, and to within ``tolerance``, by default that of torch, all tensors."""
    assert found[0] == pytest.approx(wanted[0], rel=tolerance or 1e-6)
    of_steps = [*zip(found[1], wanted[1], strict=True), (found[2], wanted[2])]
    for step, (one, other) in enumerate(of_steps):
        assert one.keys() == other.keys(), (step, one.keys() ^ other.keys())
        for name in other:
            torch.testing.assert_close(
                one[name],
                other[name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name, s=step: f"{n}, step {s}: {m}",
            )


GRIDS = {"pp 1": (2, 1), "pp 2": (2, 2), "pp 2 x dp 2": (4, 2), "pp 4": (4, 4)}


def on_grid(
    grid: str,
    function: Callable[..., Record],
    *args: Any,
    micro_batches: int | None = None,
    init: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[Record]:
    ranks, stages = GRIDS[grid]
    settings = {"pipe_size": stages, "num_micro_batches": micro_batches, **(init or {})}
    return run_ranks(function, ranks, *args, init=settings, **kwargs)
