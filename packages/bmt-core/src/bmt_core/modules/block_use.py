"""``BlockUse``: the one value through which schedules and the sharding engine meet; and how a schedule gets its Blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.packages import PACKAGES
from bmt_core.run.bmtrain_names import BlockMode
from bmt_core.run.runtime import current


@dataclass(frozen=True, kw_only=True)
class BlockUse:
    """Which of the step's uses of a block a call is: whether its forward, and its backward, is the first or the last.

    A schedule (pipeline stages, gradient accumulation) says it before the call's forward; the engine of the block acts on it:

    - ``first_forward``: look whether an optimizer has stepped, and gather the parameters if they are not there.
    - ``last_forward``: free them after this forward, at level 3. Otherwise they stay for the next forward.
    - ``first_backward``: gather them again if they are not there. Otherwise they stay from the backward before this one, or from
      the forward, if no forward was the last.
    - ``last_backward``: reduce the gradients, and free the parameters. Before, gradients are summed on each rank, in float32 for
      half types, without communication.

    The default is a block that is used once a step. Per block and step at level 3, GPipe gathers twice (for all forwards, for
    all backwards), 1F1B once, accumulation twice per micro-batch; each reduces once. Blocks that are about to be needed again may
    stay gathered, which saves gathers.
    """

    first_forward: bool = True
    last_forward: bool = True
    first_backward: bool = True
    last_backward: bool = True


@runtime_checkable
class Scheduled(Protocol):
    """What a schedule drives: a Block."""

    _mode: BlockMode

    def set_use(self, use: BlockUse) -> None:
        """Say which use the following calls of the block are."""


_at_end_of_step: dict[Callable[[], None], None] | None = None


@contextmanager
def scheduled_step() -> Iterator[None]:
    """Run all backward passes of a step inside. Nobody reads, sets or clears ``.grad`` of parameters in Blocks before it ends.

    So Blocks need not make gradients that could be cleared, while what is to be reduced is only summed. A step inside another one
    is a part of it.
    """
    global _at_end_of_step
    if _at_end_of_step is not None:
        yield
        return
    _at_end_of_step = {}
    try:
        yield
    finally:
        callbacks, _at_end_of_step = _at_end_of_step, None
        for callback in callbacks:
            callback()


def is_in_scheduled_step() -> bool:
    """Whether a :func:`scheduled_step` runs."""
    return _at_end_of_step is not None


def at_end_of_scheduled_step(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called once when the :func:`scheduled_step` ends that runs; False: none does."""
    if _at_end_of_step is None:
        return False
    _at_end_of_step[callback] = None
    return True


def make_block(module: nn.Module, *, local_axes: Iterable[str]) -> nn.Module:
    """Return ``module`` as a Block; :class:`ConfigError` if no installed package makes Blocks."""
    make = current().make_block
    if make is None:
        raise ConfigError(
            f"{type(module).__name__} has to become a Block, and no active plugin makes Blocks."
            f" Install bmt-zero: {PACKAGES['bmt-zero'].install}."
        )
    return make(module, local_axes=local_axes)
