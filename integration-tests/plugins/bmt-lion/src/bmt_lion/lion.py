"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, overload

import torch


class Lion(torch.optim.Optimizer):
    r"""Lion, "EvoLved Sign Momentum" (Chen et al., Symbolic Discovery of Optimization Algorithms,
    2023, algorithm 2).

    With gradient g, momentum m (from 0), learning rate lr and weight decay wd, each step is::

        p <- p - lr * (sign(beta1 * m + (1 - beta1) * g) + wd * p)
        m <- beta2 * m + (1 - beta2) * g

    Every operation is elementwise, so that sharded parameters train like whole ones. One
    multi-tensor kernel per operation, whatever the number of parameters; one temporary of the size
    of the gradients.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = Lion([weight], lr=0.5)
    >>> weight.grad = torch.tensor([0.001, -1000.0])
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.5000, -0.5000])
    """

    name: ClassVar[str] = "lion"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr must not be negative, it is {lr}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), they are {betas}.")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, it is {weight_decay}.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step with the gradients at hand, or with those that ``closure`` makes; return
        what it returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, grads, moments in self._tensors(group):
                _update(params, grads, moments, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _tensors(self, group: dict[str, Any]) -> Iterable[tuple[list[torch.Tensor], ...]]:
        """Return (params, grads, moments) of those with a gradient, by device and dtype, as
        multi-tensor kernels want them.
        """
        batches: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], ...]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise ValueError(
                    "Lion takes dense gradients only: use sparse=False in the embedding."
                )
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            batch = batches.setdefault((param.device, param.dtype), ([], [], []))
            for tensors, tensor in zip(batch, (param, param.grad, state["exp_avg"]), strict=True):
                tensors.append(tensor)
        return batches.values()


def _update(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: list[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    directions = torch._foreach_lerp(moments, grads, 1 - betas[0])
    torch._foreach_sign_(directions)
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, directions, alpha=-lr)
    torch._foreach_lerp_(moments, grads, 1 - betas[1])
