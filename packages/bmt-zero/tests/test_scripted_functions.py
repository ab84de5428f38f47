"""Functions of ``torch.jit.script`` in Blocks, as models written for BMTrain have them, compared
with plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import grads_of

from bmt_core import ConfigError
from bmt_core.run.runtime import rank
from bmt_testing import on_ranks
from bmt_zero import Block
from cells import cells

WIDTH = 6


@torch.jit.script
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    variance = hidden.float().pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(hidden.dtype) * weight


@torch.jit.script
def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))


class Layer(nn.Module):
    """``ends_scripted``: the last tensors that backward needs are saved inside a script."""

    def __init__(self, ends_scripted: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.last_norm = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.ends_scripted = ends_scripted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(gelu(self.up(rms_norm(x, self.norm, 1e-6))))
        out = rms_norm(x, self.last_norm, 1e-6)
        return out if self.ends_scripted else torch.tanh(out)


def data(step: int, length: int) -> list[torch.Tensor]:
    """A batch for each of two ranks."""
    return [
        torch.randn(2, length, WIDTH, generator=torch.manual_seed(10 * step + of_rank))
        for of_rank in range(2)
    ]


@on_ranks(2)
@cells("use_checkpoint", [True, False])
@cells("ends_scripted", [True, False])
def test_training_equals_plain_torch_from_the_first_step(
    ends_scripted: bool, use_checkpoint: bool
) -> None:
    """With batches of two shapes, each met several times: then the interpreter has optimized its
    scripts for both.
    """
    plain = nn.Sequential(Layer(ends_scripted), Layer(ends_scripted))
    blocks = nn.Sequential(
        *[Block(Layer(ends_scripted), use_checkpoint=use_checkpoint) for _ in range(2)]
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, blocks)]
    for step in range(5):
        batches = data(step, 3 + step // 3)
        whole, own = torch.cat(batches).requires_grad_(), batches[rank()].requires_grad_()
        for model, x, optimizer in zip((plain, blocks), (whole, own), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x).square().sum() / 100).backward()
        assert whole.grad is not None
        torch.testing.assert_close(own.grad, whole.grad.chunk(2)[rank()], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads_of(blocks), grads_of(plain), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()


def shared_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Becomes a script that nothing else in this process has called."""
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + 1e-6)).to(hidden.dtype) * weight


class Shared(nn.Module):
    """A block whose norm is called outside of it too, twice between its forward and
    its backward.
    """

    def __init__(self, norm: Any, **block: Any) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.norm = norm
        layer = SharedLayer(norm)
        self.layer = Block(layer, **block) if block else layer
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (
            self.norm(self.layer(x), self.weight),
            self.norm(self.layer(2 * x), self.weight),
        )
        return first + second.sin()


class SharedLayer(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm, self.weight, self.linear = (
            norm,
            nn.Parameter(torch.rand(WIDTH)),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x, self.weight))


@on_ranks(2)
def test_a_script_that_is_called_outside_of_blocks_too_trains() -> None:
    assert torch._C._get_graph_executor_optimize()
    plain, model = Shared(shared_norm), Shared(torch.jit.script(shared_norm), use_checkpoint=True)
    for step in range(3):
        for each in (plain, model):
            (each(torch.cat(data(step, 3)).requires_grad_()).square().sum() / 100).backward()
    torch.testing.assert_close(grads_of(model.layer), grads_of(plain.layer, times=2))
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


@on_ranks(1)
def test_a_scripted_module_is_refused() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(
        ConfigError,
        match=r"^1 is a module of torch\.jit\.script, whose parameters cannot be sharded",
    ):
        Block(layer)
