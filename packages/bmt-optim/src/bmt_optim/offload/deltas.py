"""``Deltas``: mean and variance of Adam's updates of half-precision parameters, before the learning
rate is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmt_core.ops import read_master
from bmt_optim.current_run import replicas, world

Tensors = Sequence[torch.Tensor]


class Deltas:
    """Sums of (m / b1) / (sqrt(v / b2) + eps) + weight_decay * p, p before the step, over all half
    parameters in one step.
    """

    def __init__(self) -> None:
        # Elements, deltas, squared deltas; a replica counts in part.
        self.sums = torch.zeros(3, dtype=torch.float64, device="cpu")

    def add(
        self,
        before: Sequence[torch.Tensor | None],
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        parameters: Sequence[torch.nn.Parameter],
        settings: Mapping[str, Any],
    ) -> None:
        """Add the deltas of ``parameters``, or of pieces of them, in a step with ``settings``
        (of ``adam_step``).

        ``before`` is the result of :func:`copied_masters` before the step; the moments are those
        after it.
        """
        for weight, mean, square, parameter in zip(
            before, exp_avgs, exp_avg_sqs, parameters, strict=True
        ):
            if weight is not None:
                delta = _delta(weight, mean, square, settings).double()
                sums = [delta.numel(), delta.sum().item(), delta.square().sum().item()]
                self.sums += torch.tensor(sums, dtype=torch.float64, device="cpu") / replicas(
                    parameter
                )

    def mean_and_variance(self, device: torch.device) -> tuple[float, float]:
        """Return both, over all ranks; NaN where nothing was counted. Collective."""
        sums = self.sums.to(device)
        world().all_reduce(sums).wait()
        number, total, squares = sums.tolist()
        if not number:
            return float("nan"), float("nan")
        mean = total / number
        return mean, max(squares / number - mean * mean, 0.0)


def copied_masters(
    params: Tensors, masters: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return copies of the masters, whole ones also of remainders; None for parameters without a
    master, which do not count.
    """
    return [_copied(p, master) for p, master in zip(params, masters, strict=True)]


def _copied(p: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor | None:
    if master is None:
        return None
    return read_master(p, master) if master.dtype == torch.int16 else master.clone()


def _delta(
    weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, s: Mapping[str, Any]
) -> torch.Tensor:
    step = s["step"]
    denominator = (square / (1 - s["beta2"] ** step)).sqrt_().add_(s["eps"])
    delta: torch.Tensor = (mean / (1 - s["beta1"] ** step)).div_(denominator)
    return delta.add_(weight, alpha=s["weight_decay"])
