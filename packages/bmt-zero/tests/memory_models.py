"""What the tests of memory run on every rank."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
from meta_models import MemoryMeter
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmt_core.run.runtime import current
from bmt_zero import Block, TransformerBlockList

BLOCKS, WIDTH = 8, 256


class Layer(nn.Module):
    """Parameters of half a megabyte, activations of some kilobytes; ``scale`` is no linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.scale
        return out


def blocks(
    level: int,
    use_checkpoint: bool,
    dtype: torch.dtype = torch.float32,
    kind: type[Layer] = Layer,
    count: int = BLOCKS,
) -> TransformerBlockList:
    torch.manual_seed(1)
    layers = [kind().to(current().device, dtype) for _ in range(count)]
    return TransformerBlockList([Block(layer, use_checkpoint, level) for layer in layers])


class InParts(Layer):
    """A part of it is called again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def step(model: nn.Module) -> None:
    parameter = next(model.parameters())
    model(torch.ones(2, WIDTH, dtype=parameter.dtype, device=parameter.device)).float().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-4)
            parameter.grad = None


def block_bytes(model: Any) -> int:
    """Bytes of one block's full parameters, with padding."""
    return int(model[0]._bmt_block.state.groups[0].flat.full_bytes)


def transient(use_checkpoint: bool, dtype: torch.dtype) -> tuple[float, float]:
    """The most that a step takes beside what is kept, in blocks, and what the shards' gradients are of it."""
    if current().device.type == "cuda":
        return _transient_on_cuda(use_checkpoint, dtype)
    with MemoryMeter() as meter:
        model = blocks(3, use_checkpoint, dtype)
        for _ in range(2):
            step(model)
        rest = meter.peak = meter.current
        step(model)
    return _in_blocks(model, meter.peak - rest)


def _transient_on_cuda(use_checkpoint: bool, dtype: torch.dtype) -> tuple[float, float]:
    model = blocks(3, use_checkpoint, dtype)
    for _ in range(2):
        step(model)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model)
    torch.cuda.synchronize()
    return _in_blocks(model, torch.cuda.max_memory_allocated() - rest)


def _in_blocks(model: Any, size: int) -> tuple[float, float]:
    shards = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    return size / block_bytes(model), shards / block_bytes(model)


def grown(level: int, use_checkpoint: bool, steps: int) -> tuple[int, ...]:
    """How much more memory there is after the last ten steps than after ten early ones: allocated, and on CUDA reserved.

    The least of ten: a thread of gloo's may still hold for a moment what it has sent.
    """
    model = blocks(level, use_checkpoint, count=4)
    meter = MemoryMeter()
    seen = []
    with meter if current().device.type == "cpu" else nullcontext():
        for _ in range(steps):
            step(model)
            seen.append(_present(meter))
    first, last = (map(min, zip(*some, strict=True)) for some in (seen[5:15], seen[-10:]))
    return tuple(now - then for now, then in zip(last, first, strict=True))


def _present(meter: MemoryMeter) -> tuple[int, ...]:
    if current().device.type == "cpu":
        return (meter.current,)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def objects_left(level: int, use_checkpoint: bool) -> int:
    """How many objects more there are after fifty steps than after ten, without the garbage collector."""
    return _left(blocks(level, use_checkpoint, count=4), ())


def objects_of_ours_left(use_checkpoint: bool) -> int:
    """The same of tensors and objects of ours, where torch's checkpoint leaves functions behind."""
    return _left(blocks(3, use_checkpoint, kind=InParts, count=4), ("torch", "bmt"))


def _left(model: nn.Module, modules: tuple[str, ...]) -> int:
    def count() -> int:
        return len([o for o in gc.get_objects() if not modules or str(type(o).__module__).startswith(modules)])

    for _ in range(10):
        step(model)
    gc.collect()
    gc.disable()
    try:
        before = count()
        for _ in range(40):
            step(model)
        return count() - before
    finally:
        gc.enable()


def steps_without_synchronising(level: int, use_checkpoint: bool) -> None:
    """Train under torch's guard against operations for which the host waits."""
    model = blocks(level, use_checkpoint, torch.bfloat16)
    for _ in range(2):
        step(model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
