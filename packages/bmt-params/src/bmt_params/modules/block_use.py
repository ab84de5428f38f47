"""``BlockUse``, by which a schedule tells a Block the place of a call in the step,
and ``make_block``.
"""

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
    """The place of a block's call in the step: whether its forward and its backward are the first
    or the last of the block.

    A schedule (pipeline stages, gradient accumulation) sets it before the call's forward, and the
    block acts on it:

    - ``first_forward``: check whether an optimizer has stepped, and gather the parameters if they
      are not there.
    - ``last_forward``: at level 3, free the parameters after this forward. Otherwise keep them for
      the next forward.
    - ``first_backward``: gather the parameters again if they are not there. A later backward uses
      those kept from the backward before it, or from forward if no forward had ``last_forward``.
    - ``last_backward``: reduce the gradients, and free the parameters. An earlier backward adds its
      gradients to a sum on this rank, in float32 for half types, without communication.

    The default describes a block that is used once a step. Per block and step at level 3, GPipe
    gathers twice (for all forwards and for all backwards), 1F1B once, and accumulation twice per
    micro-batch; each reduces once. Blocks that are needed again soon may stay gathered, which
    saves gathers.
    """

    first_forward: bool = True
    last_forward: bool = True
    first_backward: bool = True
    last_backward: bool = True


@runtime_checkable
class Scheduled(Protocol):
    """A Block, as a schedule sees it."""

    _mode: BlockMode

    def set_use(self, use: BlockUse) -> None:
        """Set the :class:`BlockUse` of the following calls."""


# A dict, because a callback that comes again is called once, and in order.
_at_end_of_step: dict[Callable[[], None], None] | None = None


@contextmanager
def scheduled_step() -> Iterator[None]:
    """Run all backward passes of a step inside. The caller must not read, set or clear ``.grad`` of
    parameters in Blocks inside.

    So Blocks need not set ``.grad`` between backward passes in order to notice a ``zero_grad``. A
    nested call does nothing.
    """
    global _at_end_of_step
    if _at_end_of_step is not None:
        yield
        return
    _at_end_of_step = {}
    try:
        yield
    finally:
        # Before they are called: callbacks ask again, and must be told that no step runs.
        callbacks, _at_end_of_step = _at_end_of_step, None
        for callback in callbacks:
            callback()


def is_in_scheduled_step() -> bool:
    """Whether a :func:`scheduled_step` runs."""
    return _at_end_of_step is not None


def at_end_of_scheduled_step(callback: Callable[[], None]) -> bool:
    """Call ``callback`` once at the end of the running :func:`scheduled_step`. Return False if
    none runs.
    """
    if _at_end_of_step is None:
        return False
    _at_end_of_step[callback] = None
    return True


def make_block(module: nn.Module, *, local_axes: Iterable[str]) -> nn.Module:
    """Return ``module`` as a Block; :class:`ConfigError` if no installed package makes Blocks."""
    make = current().make_block
    if make is None:
        raise ConfigError(
            f"{type(module).__name__} must become a Block, but no active plugin makes Blocks."
            f" Install bmt-zero: {PACKAGES['bmt-zero'].install}."
        )
    return make(module, local_axes=local_axes)
