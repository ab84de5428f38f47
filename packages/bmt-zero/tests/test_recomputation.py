"""Recomputation in backward runs under the modes of forward, and is freed with the pass."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import grads_of, line

from bmt_core import world_size
from bmt_testing import on_ranks
from bmt_zero import Block
from cells import cells

MODES: dict[str, AbstractContextManager[object]] = {
    "none": nullcontext(),
    "bfloat16": torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": torch.autocast("cpu", dtype=torch.float16),
    "on meta": torch.device("meta"),
}


class Shifted(nn.Module):
    """A layer that makes a tensor on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x + torch.ones(6))))
        return y


@on_ranks(2)
@cells(
    ("forward", "backward"),
    [
        ("bfloat16", "none"),
        ("bfloat16", "float16"),
        ("none", "on meta"),
        ("bfloat16", "on meta"),
    ],
)
@cells("level", [2, 3])
def test_autocast_and_default_device_are_those_of_forward(
    level: int, forward: str, backward: str
) -> None:
    torch.manual_seed(0)
    plain = [Shifted() for _ in range(2)]
    blocks = [Block(layer, use_checkpoint=True, zero_level=level) for layer in copy.deepcopy(plain)]
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    for model in (plain, blocks):
        y = x
        with MODES[forward]:
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=False) if model is plain else layer(y)
        one = torch.ones_like(y)
        # Torch's checkpoint restores autocast, but not the default device.
        with MODES["none" if model is plain and backward == "on meta" else backward]:
            y.backward(one)
    for layer, block in zip(plain, blocks, strict=True):
        torch.testing.assert_close(grads_of(block), grads_of(layer, times=world_size()))


class LooksBack(nn.Module):
    """Asks for a gradient of the second layer in forward, and notes what is left of the
    recomputation that this took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = line(0.5), line(0.5)
        self.left: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        y = torch.tanh(self.second(h))
        (slope,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
        recomputation = self._bmt_block.state.running.recomputation  # type: ignore[union-attr]
        self.left.append(list(recomputation._recomputed))
        out: torch.Tensor = y * slope
        return out


@on_ranks(2)
def test_what_a_backward_inside_of_forward_recomputed_is_freed_at_its_end() -> None:
    block = Block(LooksBack(), use_checkpoint=True)
    block(torch.ones(1, 2)).sum().backward()
    # Not the second, of the recomputation: what that keeps is what backward reads next.
    assert block.left[0] == [] and len(block.left) == 2
