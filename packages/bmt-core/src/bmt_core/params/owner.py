"""``ParameterOwner``: who keeps the parts of several parameters in one tensor, and what optimizers tell it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bmt_core.run.lanes import Mark

ReductionWatcher = Callable[[torch.Tensor, Mark], None]
"""Called with the flat tensor that the ``.grad`` of an owner's parameters will be views of, and when its values will be there."""


class ParameterOwner(Protocol):
    """Keeps the parts of several parameters in one tensor, a Block's or those outside of Blocks, and gathers and reduces them.

    A parameter refers to its owner by ``owner_reference``; :func:`owner_of` returns the owner itself.
    """

    def note_update(self, done: Mark | None = None, reads: object = None) -> None:
        """Learn that an optimizer writes new values, so that the next gather waits for them.

        ``done``: when they are written; None: when the current stream has come to this point. ``reads``: what the update
        reads on another stream until then, which the owner keeps alive. An optimizer says this once per owner and step.
        """

    def wait_for_updates(self) -> None:
        """Let the computation wait for all updates that were noted."""

    def note_replaced_memory(self) -> None:
        """Learn that a parameter was given other memory: the owner takes it over before the next use."""

    def reduce_held_back(self) -> None:
        """Reduce gradients that were kept back between micro-batches, so that ``.grad`` is complete. Collective."""

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        """Call ``watcher(flat, done)`` once per backward pass, after the last reduction into ``flat`` was queued."""

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the whole ``parameter``, part of the graph, if the owner has gathered it for the outermost call under way.

        Asked when a parameter outside of Blocks is read; after None it is gathered by itself. Not collective.
        """


OwnerReference = weakref.ref[ParameterOwner]


def owner_of(parameter: Any) -> ParameterOwner | None:
    """Return the owner of ``parameter``; None for an ordinary parameter, or one that nobody keeps together with others."""
    reference: OwnerReference | None = getattr(parameter, "owner_reference", None)
    return None if reference is None else reference()
