"""Layers that are recomputed, and their training, in which operations are counted."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zero_models import full_gradient

from bmt_zero import Block

WIDTH, BOTH = 16, ("attention", "products")
ATTENTION, LINEAR, BATCHED = "scaled_dot_product", "addmm", "bmm"


class Attends(nn.Module):
    """Attention and a feed-forward part, of linear layers and, if it ``mixes``, other products."""

    def __init__(self, dropout: float = 0.0, *, mixes: bool = False) -> None:
        super().__init__()
        self.norm, self.heads, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout, self.mixes = nn.Dropout(dropout), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self.heads(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout.p
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        if self.mixes:
            weights = torch.baddbmm(x.new_ones(1, 1), x, x.transpose(1, 2)).softmax(-1)
            x = x + torch.einsum("bij,bjk->bik", weights, x) @ self.out.weight
            # Autocast does not cast the arguments of all products.
            x = x * torch.mv(x[:, 0], self.norm.weight).view(-1, 1, 1)
            x = torch.einsum("bij,j->bij", x, self.norm.weight)
        y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Calls(TorchDispatchMode):
    """Counts operations by the word in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        for word in (ATTENTION, LINEAR, BATCHED, "gelu"):
            if word in name and "backward" not in name:
                self.count[word] += 1
        return function(*args, **(kwargs or {}))


def inputs(step: int = 0, length: int = 6) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step))


def train(
    layers: list[nn.Module], dtype: torch.dtype | None = None, steps: int = 2, waiting: int = 1
) -> tuple[Any, Counter[str]]:
    """Return all losses, gradients and next random numbers of copies of ``layers``, and the
    operations of the last backward; ``waiting`` calls wait for it at a time.
    """
    found: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        losses = []
        for micro in range(waiting):
            x = inputs(step + micro).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                y = x
                for layer in layers:
                    y = layer(y)
            losses.append(y.float().square().sum())
            found.append(losses[-1].detach())
        with Calls() as calls:
            for loss in losses:
                loss.backward()
        grads = [full_gradient(p) for layer in layers for p in layer.parameters()]
        found += [grads, x.grad, torch.rand(1)]
        for layer in layers:
            layer.zero_grad()
    return found, calls.count


def blocks_of(layers: list[nn.Module], keep: Any, level: int = 3) -> list[nn.Module]:
    return [Block(copy.deepcopy(layer), zero_level=level, keep=keep) for layer in layers]


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
