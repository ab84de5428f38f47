"""``BlockUse``: the one value through which schedules and the sharding engine meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class BlockUse:
    """Which of the step's uses of a block the next call is.

    A schedule (pipeline stages, gradient accumulation) writes it, the sharding engine reads it: parameters are
    gathered at ``first_*``, freed at ``last_forward`` and after ``last_backward``, and gradients are reduced at
    ``last_backward``; before that they are summed locally, in float32 for half types. The default is a block that is
    used once a step.
    """

    first_forward: bool = True
    last_forward: bool = True
    first_backward: bool = True
    last_backward: bool = True


class Scheduled(Protocol):
    """What a schedule drives."""

    def set_use(self, use: BlockUse) -> None:
        """Say which use the following calls of the block are."""
