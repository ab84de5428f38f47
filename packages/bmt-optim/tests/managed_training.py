"""A small training with two optimizers of one manager, for the tests of its states."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_optim.lr_scheduler import Exponential
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter

SHAPES = {"weight": (3, 5), "bias": (5,), "scalar": (), "one": (1,), "tiny": (2,), "plain": (2, 3)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bmt": lambda params: AdamOptimizer(params, lr=0.05, weight_decay=0.1, compact_master=False),
    "bmt_compact": lambda params: AdamOptimizer(
        params, lr=0.05, weight_decay=0.1, compact_master=True
    ),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


class Training:
    """Parameters (sharded but for ``plain``), two optimizers, one with and one without
    a scheduler.
    """

    def __init__(self, kind: str, dtype: torch.dtype, *, is_new: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params: dict[str, torch.nn.Parameter] = {}
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            is_plain = name == "plain" or not runtime.is_initialized()
            self.params[name] = (
                torch.nn.Parameter(value) if is_plain else DistributedParameter(value)
            )
        named = list(self.params.items())
        first, second = (OPTIMIZERS[kind]([p for _, p in part]) for part in (named[:3], named[3:]))
        self.schedule = Exponential(first, 0.05, 0, 10, gamma=0.5 if is_new else 0.8)
        self.manager = OptimManager(
            loss_scale=4.0 if is_new else 256.0,
            loss_scale_steps=4,
            min_loss_scale=2 if is_new else 1,
        )
        self.manager.add_optimizer(first, self.schedule)
        self.manager.add_optimizer(second)

    def run(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 + step)
            self.manager.zero_grad()
            for p in self.params.values():
                is_shard = isinstance(p, DistributedParameter)
                whole = torch.randn(p.full_shape if is_shard else p.shape, generator=generator).to(
                    p.dtype
                )
                p.grad = p.local_part(whole).clone() if is_shard else whole / runtime.world_size()
                p.grad *= self.manager.loss_scale
            self.manager.step()

    def wholes(self) -> dict[str, torch.Tensor]:
        return {
            name: (
                p.gather_like(p.detach()) if isinstance(p, DistributedParameter) else p.detach()
            ).clone()
            for name, p in self.params.items()
        }

    def set_wholes(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(
                    p.local_part(values[name])
                    if isinstance(p, DistributedParameter)
                    else values[name]
                )

    def module(self) -> DistributedModule:
        module = DistributedModule()
        for name, p in self.params.items():
            module.register_parameter(name, p)
        return module

    def result(self) -> dict[str, Any]:
        """The whole parameters and the numbers that decide the next steps."""
        numbers = {
            name: getattr(self.manager, name) for name in ("loss_scale", "steps_since_last_scale")
        }
        return {
            **self.wholes(),
            **numbers,
            "num_iter": self.schedule.num_iter,
            "lr": self.schedule.current_lr,
        }


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(found: Any, expected: Any) -> None:
    """Fail unless two results are equal in every bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
