"""Managers of one parameter, with optimizers of every kind, that the tests of
``OptimManager`` share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_optim import AdamOptimizer, OptimManager

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BAD = [math.inf, -math.inf, math.nan]


class Unaware(torch.optim.Optimizer):
    """An optimizer as anybody writes one: no scale, no flags."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


class TakesScale(torch.optim.SGD):
    """An optimizer as BMTrain's are: ``step`` divides the gradients by ``scale``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.scales: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1) -> None:  # type: ignore[override]
        self.scales.append(scale)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / scale)


class Apex(Unaware):
    """An optimizer as apex's fused ones are: ``step`` refuses what earlier versions took."""

    def step(
        self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: Any = None
    ) -> None:  # type: ignore[override]
        if scale is not None:
            raise RuntimeError("scale was removed: unscale the gradients before.")
        super().step(closure)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bmt": lambda params: AdamOptimizer(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "unaware": Unaware,
    "takes_scale": TakesScale,
    "apex": Apex,
}


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0, 2.0, 3.0), dtype=dtype))


def managed(p: torch.nn.Parameter, kind: str = "bmt", **options: Any) -> OptimManager:
    manager = OptimManager(**options)
    manager.add_optimizer(KINDS[kind]([p]))
    return manager


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail when a tensor's value is read on the host: what would make the host wait for a GPU."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default, (
                "a value is read on the host"
            )
            return func(*args, **(kwargs or {}))

    with Watch():
        yield
