"""``SchedulerSteps``: steps the schedulers of an ``OptimManager``, and notices a program that steps
them too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from bmt_core.errors import CheckpointError, ConfigError
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


def check_scheduler(scheduler: Any) -> None:
    """Raise :class:`ConfigError` if ``scheduler.step`` needs arguments, before a step fails with
    its optimizers stepped.
    """
    if scheduler is None:
        return
    parameters = inspect.signature(scheduler.step).parameters.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, which OptimManager.step()"
            " does not have. Add the optimizer without this scheduler, and call"
            f" scheduler.step({', '.join(needed)}) yourself after manager.step()."
        )


def check_schedulers(schedulers: Sequence[Any], states: Sequence[Any]) -> None:
    """Raise :class:`CheckpointError` if ``states`` are not those of ``schedulers``, of which each
    is None or one.
    """
    found = [saved is not None for saved in states]
    expected = [scheduler is not None for scheduler in schedulers]
    if found != expected:
        raise CheckpointError(
            f"The state is of {len(found)} optimizers, {sum(found)} with a scheduler; this"
            f" manager has {len(expected)}, {sum(expected)} with a scheduler, or in another"
            " order. Add the same ones before loading."
        )
    for scheduler, saved in zip(schedulers, states, strict=True):
        # Torch's schedulers would stay at their first step, and say nothing.
        own = {} if scheduler is None else scheduler.state_dict()
        position = next((key for key in ("num_iter", "last_epoch") if key in own), None)
        step = saved.get(position) if isinstance(saved, Mapping) else None
        if position is not None and not isinstance(step, int):
            raise CheckpointError(
                f"The state of a scheduler has no {position!r}, which {type(scheduler).__name__}"
                " needs: another scheduler's."
            )
