"""Submodules that compute each token by itself, in tiles: the same training as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zero_models import BATCH, all_weights, full_gradient, my_part

from bmt_core.errors import ConfigError
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList, no_sync
from pairwise import pairwise

WIDTH, TOKENS = 6, 7


class MLP(nn.Module):
    """Linear layers with and without a bias, one used twice, a tied weight, another parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 9, bias=False), nn.Linear(WIDTH, 9)
        self.down, self.dropout = nn.Linear(9, WIDTH), nn.Dropout(dropout)
        self.again, self.scale = nn.Linear(9, WIDTH), nn.Parameter(torch.rand(9))
        self.again.weight = self.down.weight
        self.token_wise = True
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, x.shape[1])
        hidden = self.dropout(F.silu(self.gate(x)) * self.up(x) * self.scale)
        y: torch.Tensor = self.down(hidden) + self.again(hidden.tanh())
        return y + self.down(self.up(y).sin())


class InLoop(MLP):
    """Computes tiles of two tokens itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(InLoop, self).forward(part) for part in x.split(2, 1)], 1)


class Layer(nn.Module):
    """Mixes tokens before and after the MLP, whose norm and whose last linear layer are tiled, too.
    ``case`` is what is special about it.
    """

    def __init__(self, mlp: nn.Module, case: str = "") -> None:
        super().__init__()
        self.norm, self.mix, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity()
        self.mlp, self.case = mlp, case
        self.norm.token_wise = True  # type: ignore[assignment]
        if case == "more":
            self.last = nn.Linear(WIDTH, WIDTH)
            self.last.token_wise = True  # type: ignore[assignment]
        if case == "frozen":
            mlp.requires_grad_(False)
        if case == "adapters":  # one weight is trained
            mlp.requires_grad_(False)
            mlp.up.weight.requires_grad_(True)
        if case == "only mlp":
            self.norm.requires_grad_(False)
            self.mix.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        h = x + (self.mix(normed) - normed.mean(1, keepdim=True)).sin()
        inner: Callable[[torch.Tensor], torch.Tensor] = self.mlp
        if self.case == "nested checkpoint":
            h = h + checkpoint(inner, h, use_reentrant=False)
        if self.case == "reentrant":
            h = h + checkpoint(inner, h, use_reentrant=True)
        y: torch.Tensor = self.last(h + inner(h))
        return y * y.mean(1, keepdim=True).cos() if self.case == "more" else y


CASES = ["", "more", "frozen", "adapters", "only mlp", "nested checkpoint", "reentrant"]


def layers_of(case: str, kind: type[MLP] = MLP, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(kind(dropout), case).double() for _ in range(2)]


def data(step: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, TOKENS, width, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor], micro_batches: int = 1
) -> dict[str, Any]:
    """Gradients of the last of two steps, of inputs too, and the parameters after it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    found: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x = part(data(2 * step + micro)).requires_grad_()
            if micro + 1 < micro_batches and isinstance(next(model.children()), Block):
                with no_sync(model):
                    loss = model(x).sin().sum()
                    loss.backward()
            else:
                loss = model(x).sin().sum()
                loss.backward()
        found = {name: full_gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
    assert x.grad is not None
    found |= {f"new {name}": value for name, value in model.state_dict().items()}
    return found | {"input": x.grad}


USES = pairwise(CASES, range(4), [True, False], [1, 2, 3, 6], [1, 2])


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(("case", "level", "recomputes", "tile", "micro_batches"), USES)
@all_weights
def test_tiles_train_like_plain_torch(
    case: str, level: int, recomputes: bool, tile: int, micro_batches: int
) -> None:
    expected = train(nn.Sequential(*layers_of(case)), lambda x: x, micro_batches)
    blocks = [Block(layer, recomputes, level, tile=tile) for layer in layers_of(case)]
    found = train(nn.Sequential(*blocks), my_part, micro_batches)
    assert all(block.mlp.most == tile for block in blocks)
    expected["input"] = my_part(expected["input"])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize(("level", "recomputes"), [(3, True), (2, False)])
def test_random_numbers_are_those_of_a_loop_over_tiles(level: int, recomputes: bool) -> None:
    found = []
    for kind, tile in ((InLoop, None), (MLP, 2)):
        layers = layers_of("", kind, dropout=0.4)
        if tile is not None:
            for layer in layers:
                layer.norm.token_wise = False  # type: ignore[assignment, union-attr]
        blocks = [Block(layer, recomputes, level, tile=tile) for layer in layers]
        torch.manual_seed(1)
        found.append((train(nn.Sequential(*blocks), my_part), torch.rand(2)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)
