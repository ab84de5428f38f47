"""``Deltas``: mean and variance of what Adam moves half-precision parameters by, before the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmt_core.ops import read_master
from bmt_core.params.parameter import DistributedParameter
from bmt_optim.current_run import world


class Deltas:
    """Sums over all half parameters of (m / b1) / (sqrt(v / b2) + eps) + weight_decay * p, p before the step, of one step."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)  # elements, deltas, squared deltas; a replica counts in part

    def before(
        self, params: Sequence[torch.Tensor], masters: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return copies of the masters; None for parameters that have none, which are not counted."""
        return [_copy_of(p, master) for p, master in zip(params, masters, strict=True)]

    def after(
        self,
        before: Sequence[torch.Tensor | None],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        owners: Sequence[torch.nn.Parameter],
        settings: Mapping[str, Any],
    ) -> None:
        """Add what a step with ``settings`` (of ``adam_step``) did to ``owners``, or to pieces of them."""
        for weight, mean, square, owner in zip(before, exp_avgs, exp_avg_sqs, owners, strict=True):
            if weight is not None:
                self._add(_delta(weight, mean, square, settings), 1 / _replicas(owner))

    def mean_and_variance(self, device: torch.device) -> tuple[float, float]:
        """Return both, over all ranks; NaN where nothing was counted. Collective."""
        sums = self.sums.to(device)
        world().all_reduce(sums).wait()
        number, total, squares = sums.tolist()
        if not number:
            return float("nan"), float("nan")
        mean = total / number
        return mean, max(squares / number - mean * mean, 0.0)

    def _add(self, delta: torch.Tensor, share: float) -> None:
        delta = delta.double()
        total, squares = delta.sum().item(), delta.square().sum().item()
        self.sums += torch.tensor([delta.numel(), total, squares], dtype=torch.float64) * share


def _copy_of(p: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor | None:
    if master is None:
        return None
    return read_master(p, master) if master.dtype == torch.int16 else master.clone()


def _delta(weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, s: Mapping[str, Any]) -> torch.Tensor:
    step = s["step"]
    denominator = (square / (1 - s["beta2"] ** step)).sqrt_().add_(s["eps"])
    delta: torch.Tensor = (mean / (1 - s["beta1"] ** step)).div_(denominator)
    return delta.add_(weight, alpha=s["weight_decay"])


def _replicas(p: torch.nn.Parameter) -> int:
    return p.replicas if isinstance(p, DistributedParameter) else world().size
