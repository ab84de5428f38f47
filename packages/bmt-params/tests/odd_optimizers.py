"""Optimizers as people write them, each of which looks at more than the element that it updates, or
at no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Plain(torch.optim.Optimizer):
    """Elementwise, by :meth:`update`; the others here override that."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["average"] = torch.zeros_like(p)
                    state["average"].mul_(group["momentum"]).add_(p.grad)
                    p.sub_(group["lr"] * self.update(p, state["average"], state))

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average / (average.abs() + 1)


class Sign(Plain):
    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average.sign()


class Norm(Plain):
    """LAMB's and LARS's."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average * (p.norm() / (average.norm() + 1e-6))


class Mean(Plain):
    """Gradients with their mean taken away."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average - average.mean()


class Largest(Plain):
    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average / average.abs().max()


class NoFloat64(Plain):
    """Steps no float64, and needs the number of elements, little of which shows in large tensors of
    half types.
    """

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dtype == torch.float64:
            raise RuntimeError("expected dtype float")
        return average * (1 + 0.01 / p.numel() ** 0.5)


class Rows(Plain):
    """Adafactor's: a second moment by rows, where there are any."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return (
            average / average.square().mean(-1, keepdim=True).sqrt()
            if p.dim() > 1
            else average.sign()
        )


class NoDecayOfVectors(Plain):
    """Decides by the number of dims, which a part does not have."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average + 0.1 * p if p.dim() > 1 else average


class MatricesOnly(Plain):
    """Muon's way of refusing."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("MatricesOnly supports 2D parameters only.")

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average @ average.T @ average / average.norm() ** 3


class GlobalClip(Plain):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class StepSizeFromAll(Plain):
    """Prodigy's and D-Adaptation's: a step size in the group, from a sum over all parameters, which
    begins to act later.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(total=0.0, count=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += sum(
                float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None
            )
            group["count"] += 1
            if group["count"] > 1000:
                group["lr"] = 1 / group["total"]
        super().step()


class LaterNorm(Plain):
    """Keeps a norm in its state from the first step on, and uses it after 1000."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        state["norm"] = float(state.get("norm", 0.0)) + float(average.norm())
        state["step"] = state.get("step", 0) + 1
        return average / state["norm"] if state["step"] > 1000 else average


class Quantised(Plain):
    """Keeps its average in 8 bits, of blocks of 256 elements, in tensors that are large enough;
    others' 8-bit Adam does so.
    """

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        if p.numel() >= 4096:
            blocks = average.view(-1).split(256)
            average.view(-1).copy_(
                torch.cat([(b / b.abs().max() * 127).round() * b.abs().max() / 127 for b in blocks])
            )
        return average


class Noisy(Plain):
    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average + 0.01 * torch.randn_like(p) + 0.01 * random.random()


class NoisyRows(Rows):
    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return super().update(p, average, state) + 0.001 * torch.randn_like(p)


class LogsLargest(Plain):
    """Elementwise, but its log fails for a tensor without elements."""

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        self.largest = float(average.abs().max())
        return average


class Sharpness(torch.optim.Optimizer):
    """SAM: a step up along the gradient, by the norm of all gradients, and the gradient there, by
    a closure.
    """

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        ways = [self.param_groups[0]["rho"] * p.grad / norm for p in trained if p.grad is not None]
        for p, way in zip(trained, ways, strict=True):
            p.add_(way)
        with torch.enable_grad():
            closure()
        for p, way in zip(trained, ways, strict=True):
            p.sub_(way)
        self.base_optimizer.step()


class Averaged(torch.optim.Optimizer):
    """Wraps another optimizer, and has its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, often: int = 3) -> None:
        self.optimizer, self.often, self.steps = optimizer, often, 0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.clone())
            if self.steps % self.often == 0:
                p.copy_(slow.lerp_(p, 0.5))


class KeepsNothing(Plain):
    """Its constructor needs what it does not keep, so that its like can only be made by
    copying attributes.
    """

    def __init__(self, params: Any, total: int) -> None:
        super().__init__(params)
        self.rate = 1 / total

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return self.rate * average


class OfModel(Plain):
    """Has its model, of which no trial may make another."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters())
        self.network = model


class InTrainMode(Plain):
    """As those that average weights: steps only after ``train()``."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.is_training:
            raise RuntimeError("Call train() first.")
        super().step()


class RenamesOption(Plain):
    """Keeps an option under another name than that of its argument."""

    def __init__(self, params: Any, clip: bool = False) -> None:
        super().__init__(params)
        self.clips_norm = clip

    def update(self, p: Tensor, average: Tensor, state: dict[str, Any]) -> Tensor:
        return average / average.norm() if self.clips_norm else average
