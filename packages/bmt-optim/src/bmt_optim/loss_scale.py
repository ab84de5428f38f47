"""``LossScale``: the factor that keeps small gradients of half types from underflow, and its
changes after overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bmt_core.errors import CheckpointError


@dataclass(kw_only=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2); ``value`` None means that there
    is none.

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
        for name, attribute in {"loss_scale": "value", **_SETTINGS}.items():
            value = getattr(self, attribute)
            is_number = hasattr(value, "__float__") and not isinstance(value, bool)
            if not is_number and (value, name) != (None, "loss_scale"):
                hint = _IS_DYNAMIC if name == "loss_scale" else ""
                raise TypeError(f"{name} must be a number, not {value!r}.{hint}")
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"loss_scale must be a positive number or None, it is {self.value}.")
        if not self.factor > 1:
            raise ValueError(f"loss_scale_factor must be greater than 1, it is {self.factor}.")
        if self.steps < 1:
            raise ValueError(f"loss_scale_steps must be at least 1, it is {self.steps}.")
        if not 0 < self.minimum <= self.maximum:
            raise ValueError(
                "min_loss_scale must be positive and at most max_loss_scale, they are"
                f" {self.minimum} and {self.maximum}."
            )

    def after_step(self) -> None:
        """Count a clean step, and increase the scale after enough of them."""
        if self.value is None:
            return
        self.steps_since_last_scale += 1
        if self.steps_since_last_scale >= self.steps and self.value < self.maximum:
            self.value = min(self.value * self.factor, self.maximum)
            self.steps_since_last_scale = 0

    def after_overflow(self) -> None:
        """Decrease the scale, and count clean steps from 0."""
        if self.value is not None and self.value > self.minimum:
            self.value = max(self.value / self.factor, self.minimum)
        self.steps_since_last_scale = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything, under the names that ``OptimManager`` uses."""
        return {
            "loss_scale": 1 if self.value is None else self.value,
            "loss_scale_enabled": self.value is not None,
            "steps_since_last_scale": self.steps_since_last_scale,
            **{key: getattr(self, name) for key, name in _SETTINGS.items()},
        }

    def loaded(self, state_dict: Mapping[str, Any]) -> LossScale:
        """Return a scale with the values of ``state_dict``. Values that it lacks, as BMTrain's
        states do, are this scale's.

        All values are this scale's if the state is of a training without scaling, which says
        nothing about a scale. Raises :class:`CheckpointError` for values that no scale can have.
        """
        if not state_dict.get("loss_scale_enabled", False):
            return replace(self, steps_since_last_scale=0)
        try:
            return replace(
                self,
                value=float(state_dict["loss_scale"]),
                steps_since_last_scale=state_dict.get("steps_since_last_scale", 0),
                **{name: state_dict[key] for key, name in _SETTINGS.items() if key in state_dict},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state has no loss scale that can be used: {error}"
            ) from error


_IS_DYNAMIC = (
    " Give the scale of the first step, such as 2**20, or None for no scaling: overflows and clean"
    " steps change the scale (dynamic loss scaling)."
)
_SETTINGS = {
    "loss_scale_factor": "factor",
    "loss_scale_steps": "steps",
    "min_loss_scale": "minimum",
    "max_loss_scale": "maximum",
}
