"""``WarmupLRScheduler``: the base of all schedules: a linear warm-up, then the decay that a
subclass defines.
"""

from __future__ import annotations

from typing import Any

import torch


class WarmupLRScheduler:
    """Sets the learning rate of ``optimizer`` from the number of steps done.

    ``start_lr`` s is the rate at the end of the warm-up, which lasts ``warmup_iter`` w steps (any
    number, also a fraction); ``end_iter`` E is where the decay ends; ``num_iter`` n is the number
    of steps done so far. The constructor sets the rate.

    The first parameter group whose rate is not 0 gets the rate; every other group keeps its first
    ratio to that group, so a group at 0 stays at 0. If all groups are at 0, all get the rate. A
    rate that is a tensor stays that tensor. A subclass defines :meth:`get_lr_decay`, and may
    redefine :meth:`get_lr_warmup`. It adds the names of its own attributes to ``constants``, which
    are saved with the state.
    """

    constants: tuple[str, ...] = ("start_lr", "warmup_iter", "end_iter")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float,
        warmup_iter: float,
        end_iter: float,
        num_iter: int = 0,
    ) -> None:
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.optimizer = optimizer
        self.num_iter = num_iter
        self._first_lr = next(filter(None, map(_lr_at_start, optimizer.param_groups)), 0.0)
        self._ratios: list[float] = []
        self._current_lr = 0.0
        self.step(num_iter)

    @property
    def current_lr(self) -> float:
        """The rate now, which the first parameter group has."""
        return self._current_lr

    def get_lr(self) -> float:
        """Return the rate for the present ``num_iter``."""
        if self.num_iter < self.warmup_iter:
            return self.get_lr_warmup(self.num_iter)
        return self.get_lr_decay(self.num_iter)

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the rate after ``num_iter`` < w steps: s·n/w."""
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the rate after ``num_iter`` ≥ w steps."""
        raise NotImplementedError(f"{type(self).__name__} must define get_lr_decay.")

    def step(self, num_iter: int | None = None) -> None:
        """Go to step ``num_iter``, by default the next, and set the rates."""
        self.num_iter = self.num_iter + 1 if num_iter is None else num_iter
        self._current_lr = self.get_lr()
        groups = self.optimizer.param_groups
        for group in groups[len(self._ratios) :]:
            self._ratios.append(_lr_at_start(group) / self._first_lr if self._first_lr else 1.0)
        for group, ratio in zip(groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self._current_lr * ratio)
            else:
                group["lr"] = self._current_lr * ratio

    def state_dict(self) -> dict[str, Any]:
        """Return everything that determines future rates."""
        constants = {name: getattr(self, name) for name in self.constants}
        return {
            **constants,
            "num_iter": self.num_iter,
            "first_lr": self._first_lr,
            "ratios": list(self._ratios),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state and set the rates; constants that BMTrain's states lack stay as
        they are.
        """
        for name in self.constants:
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self._first_lr = state_dict.get("first_lr", self._first_lr)
        # A group added since then keeps the ratio found here.
        saved = state_dict.get("ratios", [])[: len(self.optimizer.param_groups)]
        self._ratios[: len(saved)] = saved
        self.step(state_dict["num_iter"])


def _lr_at_start(group: dict[str, Any]) -> float:
    # During the warm-up of an earlier scheduler all rates are 0; the rates before it are kept where
    # torch's schedulers keep them.
    if group["lr"]:
        group.setdefault("initial_lr", float(group["lr"]))
        return float(group["lr"])
    return float(group.get("initial_lr", 0.0))
