"""``SchedulerSteps``: steps the schedulers of an ``OptimManager``, and notices a program that steps
them too.
"""

from __future__ import annotations

from typing import Any

from bmt_core.run.runtime import rank
from bmt_core.user_warnings import warn_user


class SchedulerSteps:
    """Steps schedulers; warns once, on rank 0, if the program has moved one of them on since.

    A scheduler that both step goes through its learning rates twice as fast as was planned.
    """

    def __init__(self) -> None:
        self._has_warned = False
        # By ``id``: where the manager has left the schedulers, which it keeps.
        self._left_at: dict[int, int] = {}

    def forget(self) -> None:
        """The schedulers are somewhere else now, and rightly so: a state was loaded."""
        self._left_at.clear()

    def step(self, scheduler: Any) -> None:
        """Step ``scheduler``."""
        before = _position(scheduler)
        if before > self._left_at.get(id(scheduler), before) and not self._has_warned:
            self._has_warned = True
            if rank() == 0:
                warn_user(
                    f"{type(scheduler).__name__} has been stepped by OptimManager.step() and by the"
                    " program: together they go through its learning rates faster than planned."
                    " Leave scheduler.step() out, or add the optimizer to the manager without this"
                    " scheduler. This is said once."
                )
        scheduler.step()
        self._left_at[id(scheduler)] = _position(scheduler)


def _position(scheduler: Any) -> int:
    """Return the number of steps done, of bmt's schedulers and of torch's; 0 of those that do
    not tell.
    """
    found = getattr(scheduler, "num_iter", getattr(scheduler, "last_epoch", 0))
    return found if isinstance(found, int) else 0
