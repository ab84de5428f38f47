"""``Times``: the durations of a schedule's actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.schedule import Kind


@dataclass(frozen=True, kw_only=True)
class Times:
    """The time of each computation for one micro-batch and one part of the model, and of each
    transfer, in any one unit.

    A number holds for all parts; a sequence has one number per part. A whole backward takes the
    time of both gradients.
    """

    forward: float | Sequence[float] = 1
    input_gradient: float | Sequence[float] = 1
    weight_gradient: float | Sequence[float] = 1
    transfer: float = 0

    def of(self, kind: Kind, part: int) -> float:
        """Return the time of an action of this kind in ``part``."""
        if kind is Kind.BACKWARD:
            return self.of(Kind.INPUT_GRADIENT, part) + self.of(Kind.WEIGHT_GRADIENT, part)
        time = self._of_kinds()[kind]
        return time[part] if isinstance(time, Sequence) else time

    def check(self, parts: int) -> None:
        """Raise :class:`ConfigError` unless all times are positive (a transfer may take none) and
        fit ``parts`` parts.
        """
        for kind, time in self._of_kinds().items():
            noun = kind.name.lower().replace("_", " ")
            values = time if isinstance(time, Sequence) else [time]
            if isinstance(time, Sequence) and len(time) != parts:
                raise ConfigError(
                    f"The model has {parts} parts, and there are {len(time)} times of a {noun}."
                    " Give one per part."
                )
            if min(values) <= 0:
                raise ConfigError(f"The time of a {noun} must be above 0, and got {min(values)}.")
        if self.transfer < 0:
            raise ConfigError(f"The time of a transfer must be 0 or more, and got {self.transfer}.")

    def _of_kinds(self) -> dict[Kind, float | Sequence[float]]:
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
        }
