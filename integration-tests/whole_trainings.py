"""Trainings of models by optimizers over whole tensors, on grids of ranks, and the same in plain
torch in one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamW, OptimManager, whole
from bmt_params import DistributedParameter
from bmt_zero import Block, BMTrainModelWrapper, no_sync

BATCH, IDS, WIDTH, STEPS, MICRO_BATCHES = 8, 13, 7, 4, 2
ODD = (9, 5, 11, 3)  # widths inside the layers; each layer has another level
MAX_NORM = 0.5


class Normalized(torch.optim.Optimizer):
    """A step of the length ``lr`` in the direction of the gradient, with a momentum that is
    normalised, too.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.5).add_(p.grad / p.grad.norm())
                    p -= group["lr"] * momentum / momentum.norm() / group["step"] ** 0.5


KINDS: dict[str, Any] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "Normalized": Normalized,
}


class Layer(nn.Module):
    """Two matrices of odd sizes, a norm and a frozen bias."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Layers between an embedding and a head that are one tied matrix. Some steps leave out
    the last.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.layers = nn.ModuleList(Layer(inner) for inner in ODD)
        self.head = nn.Linear(WIDTH, IDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, with_all: bool = True) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in list(self.layers)[: None if with_all else -1]:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    data = torch.randint(IDS, (BATCH, 6), generator=generator)
    return data[:, :-1], data[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices and the other parameters, by their whole shapes."""
    shapes = {
        p: p.whole_shape if isinstance(p, DistributedParameter) else p.shape
        for p in model.parameters()
    }
    return [p for p in shapes if len(shapes[p]) == 2], [p for p in shapes if len(shapes[p]) != 2]


Record = tuple[list[float], list[float], dict[str, torch.Tensor]]


def expected(kind: str) -> Record:
    """The losses, the norms, and the parameters at the end."""
    model = Model().double()
    matrices, others = split(model)
    optimizers = [KINDS[kind](matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01, eps=1e-4)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, gamma=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            ids, targets = batch(step, micro_batch)
            loss = loss_of(model(ids, step != 1), targets) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses, norms, dict(model.state_dict())


def wrapped(levels: Iterable[int]) -> Any:
    model = Model().double()
    for number, (layer, level) in enumerate(zip(list(model.layers), levels, strict=True)):
        model.layers[number] = Block(layer, use_checkpoint=number % 2 == 0, zero_level=level)
    return BMTrainModelWrapper(model)


def by_manager(kind: str, levels: tuple[int, ...]) -> Record:
    """The same on the ranks of a run, each with its part of every batch, by an ``OptimManager``."""
    model, topology = wrapped(levels), current().topology
    matrices, others = split(model)
    optimizer = whole(KINDS[kind], matrices, lr=0.05, bucket_bytes=300)
    manager = OptimManager(loss_scale=8.0)
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    manager.add_optimizer(AdamW(others, lr=0.01, eps=1e-4, weight_decay=0.01))
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            ids, targets = [
                x.chunk(topology.data_size)[topology.data_rank] for x in batch(step, micro_batch)
            ]
            loss = loss_of(model(ids, step != 1), targets) / MICRO_BATCHES
            manager.backward(loss)
            total += float(all_reduce(loss.detach(), "avg"))
        norms.append(float(manager.clip_grad_norm(model.parameters(), MAX_NORM)))
        manager.step()
        manager.zero_grad()
        losses.append(total)
    return losses, norms, dict(model.state_dict())


def in_plain_loop(kind: str, levels: tuple[int, ...]) -> Record:
    """The same without a manager, with gradients that are means, and without clipping."""
    model, topology = wrapped(levels), current().topology
    matrices, others = split(model)
    optimizers = [
        whole(KINDS[kind], matrices, lr=0.05),
        torch.optim.AdamW(others, lr=0.01, eps=1e-4),
    ]
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            ids, targets = [
                x.chunk(topology.data_size)[topology.data_rank] for x in batch(step, micro_batch)
            ]
            loss = loss_of(model(ids), targets) / MICRO_BATCHES
            if micro_batch + 1 < MICRO_BATCHES:
                with no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            total += float(all_reduce(loss.detach(), "avg"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return losses, [], dict(model.state_dict())


def expected_in_plain_loop(kind: str) -> Record:
    model = Model().double()
    matrices, others = split(model)
    optimizers = [KINDS[kind](matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01, eps=1e-4)]
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            ids, targets = batch(step, micro_batch)
            loss = loss_of(model(ids), targets) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return losses, [], dict(model.state_dict())


def assert_alike(found: Record, wanted: Record, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
