"""Trainings that hand memory to the lanes in every way there is, and the same in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from offload_training import Offload
from torch import nn
from torch.nn import functional as F
from zero_models import all_weights, full_gradient, my_part

from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer
from bmt_params import DistributedModule, postpone_weight_gradients
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList, no_sync

TOKENS, WIDTH, LAYERS, STEPS, MICRO_BATCHES = 16, 24, 3, 3, 2
# A large eps: where a gradient is next to nothing, steps must not be signs of its rounding.
ADAM = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.01}
Values = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A way to train the same model. ``held``: no_sync() around the first micro-batch of each step.
    ``postponed``: weight gradients of a step are computed after its last backward pass.
    """

    level: int
    recomputes: bool
    held: bool
    optimizer: str
    splits: bool  # the parameters of each block among two optimizers
    postponed: bool


def cases(level: int, recomputes: bool) -> Iterator[Case]:
    """Yield the cases of blocks of one kind."""
    ways = (("torch", True), ("adam", False), ("adam", True), ("offload", False))
    for held, (optimizer, splits) in itertools.product((False, True), ways):
        yield Case(level, recomputes, held, optimizer, splits, postponed=False)
    yield Case(level, recomputes, True, "adam", False, postponed=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Sharded(DistributedModule):
    """The same, with parameters inside and outside of Blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        plain = Plain().to(runtime.current().device)
        self.embedding = BMTrainModelWrapper(plain.embedding)
        self.layers = TransformerBlockList(
            [Block(layer, case.recomputes, case.level) for layer in plain.layers]
        )
        self.head = BMTrainModelWrapper(plain.head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def optimizers(model: nn.Module, case: Case | None) -> list[Any]:
    """Return what updates ``model``."""
    parameters = list(model.parameters())
    if case is None:
        # The sharded embedding and head have the rest of the gradients even where this one
        # has none.
        return [torch.optim.AdamW(parameters, **ADAM)]
    halves = [parameters[::2], parameters[1::2]] if case.splits else [parameters]
    if case.optimizer == "torch":
        return [torch.optim.AdamW(half, **ADAM) for half in halves]
    offload = AdamOffloadOptimizer if runtime.current().device.type == "cuda" else Offload
    kind: Any = AdamOptimizer if case.optimizer == "adam" else offload
    return [
        kind(half, decoupled_weight_decay=True, overlap_forward=True, **ADAM) for half in halves
    ]


@all_weights
def train(model: nn.Module, case: Case | None) -> Values:
    """Return losses of this process's data, the gradients of the last step, and the parameters
    after it, whole, in order.
    """
    updaters = optimizers(model, case)
    found: Values = []
    for step in range(STEPS):
        for updater in updaters:
            updater.zero_grad()
        postponed = []
        for micro in range(MICRO_BATCHES):
            is_held = case is not None and case.held and micro + 1 < MICRO_BATCHES
            with no_sync(model) if is_held else nullcontext():
                loss = loss_of(model, step * MICRO_BATCHES + micro)
                if case is not None and case.postponed:
                    with postpone_weight_gradients() as left:
                        loss.backward()
                    postponed.append(left)
                else:
                    loss.backward()
            found.append((f"loss {micro} of step {step}", loss.detach()))
        for left in postponed:
            left.compute()
        if step + 1 == STEPS:
            found += [
                (f"gradient of {n}", g)
                for n, p in model.named_parameters()
                if (g := full_gradient(p)) is not None
            ]
        for updater in updaters:
            updater.step()
        if step == 0:
            # What is gathered ahead for a backward that does not come is dropped.
            with torch.no_grad():
                found.append(("loss evaluated", loss_of(model, 99)))
    found += [(name, value) for name, value in model.state_dict().items() if "unused" not in name]
    return [(name, value.detach().cpu().clone()) for name, value in found if "unused" not in name]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Return this process's part of the mean loss of a batch."""
    tokens = torch.randint(TOKENS, (8, 5), generator=torch.Generator().manual_seed(number))
    logits = model(my_part(tokens)).flatten(0, 1)
    return (
        F.cross_entropy(logits, my_part(tokens.roll(1, 1)).flatten(), reduction="sum")
        / tokens.numel()
    )


def plain() -> Values:
    """Return what one process in plain torch comes to."""
    return train(Plain().to(runtime.current().device), None)


def compare(expected: Values, ranks: list[Values], what: object) -> None:
    """Raise unless the trainings of all ranks came to ``expected``."""
    for number, (name, value) in enumerate(expected):
        assert all(rank[number][0] == name for rank in ranks), (what, name)
        found = [rank[number][1] for rank in ranks]
        for one in [sum(found)] if name.startswith("loss") else found:
            torch.testing.assert_close(
                one, value, rtol=1e-4, atol=1e-5, msg=partial(_named, f"{what}: {name}")
            )


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"
