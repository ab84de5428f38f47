"""``ParameterOwner``: the object that keeps the parts of several parameters in one tensor, and its
interface for optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bmt_core.run.lanes import Mark

ReductionWatcher = Callable[[torch.Tensor, Mark], None]
"""Called with the flat tensor of which the ``.grad`` will be views, and the mark after which its
values are complete.
"""


class ParameterOwner(Protocol):
    """Keeps the parts of several parameters, those of a Block or some outside of Blocks, in one
    tensor; gathers and reduces them.

    A parameter refers to its owner by ``owner_reference``; :func:`owner_of` returns the
    owner itself.
    """

    def note_update(self, done: Mark | None = None, reads: object = None) -> None:
        """Note that an optimizer writes new values, so that the next gather waits for them.

        ``done`` is the mark after which they are written; None: the current end of the current
        stream. The update reads ``reads`` on another stream until then; the owner keeps these
        objects alive. An optimizer calls this once per owner and step.
        """

    def wait_for_updates(self, *, despite_errors: bool = False) -> None:
        """Make the current stream wait for all updates that were noted. Raise the error of one that
        failed, unless ``despite_errors``.
        """

    def note_replaced_memory(self) -> None:
        """Note that a parameter was given other memory, which the owner takes over before the
        next use.
        """

    def reduce_held_back(self) -> None:
        """Reduce gradients that were held back between micro-batches, so that ``.grad`` is
        complete. Collective.
        """

    def expect_gradient(self) -> None:
        """Note that the backward pass under way adds to ``.grad`` what was reduced elsewhere. Call
        :meth:`gradient_is_set` at its end.
        """

    def gradient_is_set(self) -> None:
        """Note that the gradient is in ``.grad``, and that the pass has ended."""

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        """Call ``watcher(flat, done)`` after each reduction into ``flat`` was queued: one per
        backward of a call of the Block.
        """

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the whole ``parameter``, part of the graph, if the owner has gathered it for the
        current outermost call.

        Called when a parameter outside of Blocks is read. On None the caller gathers the parameter
        alone. Not collective.
        """


OwnerReference = weakref.ref[ParameterOwner]


def owner_of(parameter: Any) -> ParameterOwner | None:
    """Return the owner of ``parameter``; None for an ordinary parameter, or one that is
    sharded alone.
    """
    reference: OwnerReference | None = getattr(parameter, "owner_reference", None)
    return None if reference is None else reference()
