"""The schedules of BMTrain: each docstring gives the rate after the warm-up, with s, w, E, n as in
:class:`WarmupLRScheduler`.
"""

from __future__ import annotations

import math

import torch

from bmt_optim.lr_scheduler.warmup import WarmupLRScheduler


class NoDecay(WarmupLRScheduler):
    """The rate stays: s."""

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr


class Linear(WarmupLRScheduler):
    """The rate falls on a straight line to 0 at E: max(0, s·(E−n)/(E−w))."""

    def get_lr_decay(self, num_iter: int) -> float:
        if num_iter >= self.end_iter:
            return 0.0
        return self.start_lr * (self.end_iter - num_iter) / (self.end_iter - self.warmup_iter)


class Cosine(WarmupLRScheduler):
    """The rate falls on half a cosine to 0 at E (Loshchilov and Hutter 2017): s·½(1+cos(π·min(1,
    (n−w)/max(1, E−w)))).
    """

    def get_lr_decay(self, num_iter: int) -> float:
        progress = (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter)
        return self.start_lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Exponential(WarmupLRScheduler):
    """The rate falls by the factor ``gamma`` γ at every step: s·γ^(n−w)."""

    constants = (*WarmupLRScheduler.constants, "gamma")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        return float(self.start_lr * self.gamma ** (num_iter - self.warmup_iter))


class Noam(WarmupLRScheduler):
    """The rate of the Transformer (Vaswani et al. 2017, section 5.3): s/√w · n/w, then s/√n."""

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        # Without a warm-up there is a step 0; it gets the rate of step 1.
        return self.start_lr / math.sqrt(max(1, num_iter))
