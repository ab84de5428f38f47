"""Learning rates over the steps of a training."""

from bmt_optim.lr_scheduler.shapes import Cosine, Exponential, Linear, Noam, NoDecay
from bmt_optim.lr_scheduler.warmup import WarmupLRScheduler
from bmt_optim.lr_scheduler.wsd import WSD

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WSD", "WarmupLRScheduler"]
