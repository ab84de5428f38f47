"""Functions of ``torch.jit.script`` in Blocks, as models written for BMTrain have them, compared with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import full_gradient

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import rank
from bmt_testing import run_ranks
from bmt_zero import Block

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


def train(layers: nn.Module, ranks: list[int]) -> list[Any]:
    """Train on batches of two shapes, each met several times: then the interpreter has optimized its scripts for both."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    found: list[Any] = []
    for step in range(5):
        data = [torch.randn(2, 3 + step // 3, WIDTH, generator=torch.manual_seed(10 * step + of)) for of in ranks]
        x = torch.cat(data).requires_grad_()
        optimizer.zero_grad()
        loss = layers(x).square().sum() / 100
        loss.backward()
        found += [x.grad, *(full_gradient(parameter) for parameter in layers.parameters())]
        optimizer.step()
    return found


def sharded(ends_scripted: bool, use_checkpoint: bool) -> list[Any]:
    blocks = [Block(Layer(ends_scripted), use_checkpoint=use_checkpoint) for _ in range(2)]
    return train(nn.Sequential(*blocks), [rank()])


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("ends_scripted", [True, False])
def test_training_equals_plain_torch_from_the_first_step(ends_scripted: bool, use_checkpoint: bool) -> None:
    expected = train(nn.Sequential(Layer(ends_scripted), Layer(ends_scripted)), [0, 1])
    by_rank = run_ranks(sharded, 2, ends_scripted, use_checkpoint)
    inputs = len(expected) // 5
    for position, value in enumerate(expected):
        if position % inputs == 0:  # the gradient of the input: each rank has that of its batch
            found = torch.cat([of_rank[position] for of_rank in by_rank])
        else:
            found = by_rank[0][position]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def shared_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Becomes a script that nothing else in this process has called."""
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + 1e-6)).to(hidden.dtype) * weight


class Shared(nn.Module):
    """A block whose norm is called outside of it too, twice between its forward and its backward."""

    def __init__(self, norm: Any, **block: Any) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.norm = norm
        layer = SharedLayer(norm)
        self.layer = Block(layer, **block) if block else layer
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norm(self.layer(x), self.weight), self.norm(self.layer(2 * x), self.weight)
        return first + second.sin()


class SharedLayer(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm, self.weight, self.linear = norm, nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x, self.weight))


def gradients_of(model: nn.Module, ranks: list[int]) -> dict[str, torch.Tensor]:
    """The sum over three steps."""
    for step in range(3):
        data = [torch.randn(2, 3, WIDTH, generator=torch.manual_seed(10 * step + of)) for of in ranks]
        (model(torch.cat(data).requires_grad_()).square().sum() / 100).backward()
    return {name: full_gradient(p) if name.startswith("layer") else p.grad for name, p in model.named_parameters()}


def with_shared_norm(ranks: list[int]) -> dict[str, torch.Tensor]:
    assert torch._C._get_graph_executor_optimize()
    return gradients_of(Shared(torch.jit.script(shared_norm), use_checkpoint=True), ranks)


def test_a_script_that_is_called_outside_of_blocks_too_trains() -> None:
    expected = gradients_of(Shared(shared_norm), [0, 1])
    assert torch._C._get_graph_executor_optimize()
    for found in run_ranks(with_shared_norm, 2, [0, 1]):
        torch.testing.assert_close(
            {name: value / 2 if name.startswith("layer") else value for name, value in found.items()}, expected
        )


def wrapped_script() -> str:
    layer = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ConfigError) as caught:
        Block(layer)
    return str(caught.value)


def test_a_scripted_module_is_refused() -> None:
    (message,) = run_ranks(wrapped_script, 1)
    assert message.startswith("1 is a module of torch.jit.script, whose parameters cannot be sharded.")
