"""``WSD``: warm-up, stable, decay."""

from __future__ import annotations

import math
from typing import Literal

import torch

from bmt_optim.lr_scheduler.warmup import WarmupLRScheduler

Decay = Literal["linear", "sqrt", "cosine"]


class WSD(WarmupLRScheduler):
    """Warm-up, then the full rate s, then a short decay that ends at E (Hu et al. 2024, MiniCPM,
    section 4).

    The decay takes ``decay_iter`` D steps, by default a tenth of E, and at most those after the
    warm-up. With x = (n−(E−D))/D, from 0 to 1, the rate is s·(r + (1−r)·f(x)), where r is
    ``final_ratio`` and f is ``"linear"`` 1−x, ``"sqrt"`` 1−√x (Hägele et al. 2024, section 3) or
    ``"cosine"`` ½(1+cos(πx)). To train longer, go back to a checkpoint from before the decay, with
    the same ``num_iter`` and a later E.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule = WSD(optimizer, start_lr=1.0, warmup_iter=2, end_iter=10, decay_iter=4)
    >>> rates = []
    >>> for _ in range(11):
    ...     rates.append(schedule.current_lr)
    ...     schedule.step()
    >>> rates
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    constants = (*WarmupLRScheduler.constants, "decay_iter", "final_ratio", "decay")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float,
        num_iter: int = 0,
        *,
        decay_iter: float | None = None,
        final_ratio: float = 0.0,
        decay: Decay = "linear",
    ) -> None:
        if decay not in ("linear", "sqrt", "cosine"):
            raise ValueError(f"decay must be 'linear', 'sqrt' or 'cosine', not {decay!r}.")
        self.decay_iter = 0.1 * end_iter if decay_iter is None else decay_iter
        self.final_ratio = final_ratio
        self.decay = decay
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        begin = max(self.warmup_iter, self.end_iter - self.decay_iter)
        if num_iter >= self.end_iter:
            remaining = 0.0
        elif num_iter <= begin:
            remaining = 1.0
        else:
            remaining = self._remaining((num_iter - begin) / (self.end_iter - begin))
        return self.start_lr * (self.final_ratio + (1.0 - self.final_ratio) * remaining)

    def _remaining(self, x: float) -> float:
        if self.decay == "linear":
            return 1.0 - x
        if self.decay == "sqrt":
            return 1.0 - math.sqrt(x)
        return 0.5 * (1.0 + math.cos(math.pi * x))
