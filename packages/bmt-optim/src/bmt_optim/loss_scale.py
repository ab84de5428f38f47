"""``LossScale``: the factor that keeps small gradients of half types alive, and how it follows overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2); ``value`` None means that there is none.

    >>> scale = LossScale(value=1024.0, factor=2.0, steps=2)
    >>> scale.after_step(), scale.after_step(), scale.value
    (None, None, 2048.0)
    >>> scale.after_overflow(), scale.value
    (None, 1024.0)
    """

    value: float | None
    factor: float = 2.0
    steps: int = 1024
    minimum: float = 1.0
    maximum: float = math.inf
    steps_since_last_scale: int = 0

    def __post_init__(self) -> None:
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"loss_scale must be a positive number or None, it is {self.value}.")
        if not self.factor > 1:
            raise ValueError(f"loss_scale_factor must be greater than 1, it is {self.factor}.")
        if self.steps < 1:
            raise ValueError(f"loss_scale_steps must be at least 1, it is {self.steps}.")
        if not 0 < self.minimum <= self.maximum:
            raise ValueError(
                f"min_loss_scale must be positive and at most max_loss_scale, they are {self.minimum} and {self.maximum}."
            )

    def after_step(self) -> None:
        """Count a clean step, and grow when there have been enough."""
        if self.value is None:
            return
        self.steps_since_last_scale += 1
        if self.steps_since_last_scale >= self.steps and self.value < self.maximum:
            self.value = min(self.value * self.factor, self.maximum)
            self.steps_since_last_scale = 0

    def after_overflow(self) -> None:
        """Shrink, and count clean steps anew."""
        if self.value is not None and self.value > self.minimum:
            self.value = max(self.value / self.factor, self.minimum)
        self.steps_since_last_scale = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything, under the names that ``OptimManager`` uses."""
        return {
            "loss_scale": 1 if self.value is None else self.value,
            "loss_scale_enabled": self.value is not None,
            "loss_scale_factor": self.factor,
            "loss_scale_steps": self.steps,
            "min_loss_scale": self.minimum,
            "max_loss_scale": self.maximum,
            "steps_since_last_scale": self.steps_since_last_scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; what BMTrain's states lack stays as it is."""
        enabled = state_dict["loss_scale_enabled"]
        loaded = LossScale(
            value=state_dict["loss_scale"] if enabled else None,
            factor=state_dict.get("loss_scale_factor", self.factor),
            steps=state_dict.get("loss_scale_steps", self.steps),
            minimum=state_dict.get("min_loss_scale", self.minimum),
            maximum=state_dict.get("max_loss_scale", self.maximum),
            steps_since_last_scale=state_dict.get("steps_since_last_scale", 0),
        )
        self.__dict__.update(loaded.__dict__)
