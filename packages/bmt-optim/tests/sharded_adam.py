"""Parameters for tests of ``AdamOptimizer``, whole and sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bmt_optim import AdamOptimizer
from bmt_params.parameter import DistributedParameter

SHAPES = [(3, 5), (17,), (1,), (0,), (2, 3, 4)]


def parameters(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def give_gradients(params: list[torch.nn.Parameter], step: int, *, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(steps: Iterable[int], *optimizers: torch.optim.Optimizer) -> None:
    """Take the same steps with all optimizers."""
    for step in steps:
        for optimizer in optimizers:
            give_gradients([p for group in optimizer.param_groups for p in group["params"]], step)
            optimizer.step()


def give_parts(shards: list[DistributedParameter], params: list[torch.nn.Parameter]) -> None:
    """Give each shard its part of the gradient of a whole parameter."""
    for shard, p in zip(shards, params, strict=True):
        assert p.grad is not None
        shard.grad = shard.local_part(p.grad).clone()


def masters(optimizer: AdamOptimizer) -> list[torch.Tensor]:
    return [optimizer.portable_state(p)["_param_fp32"] for p in optimizer.param_groups[0]["params"]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def is_half(master: torch.Tensor) -> torch.Tensor:
    return (bits(master) & 0xFFFF) == 0x8000
