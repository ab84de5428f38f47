"""``ModelsOfRun``: what packages tell each other of the models of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import nn

from bmt_core.run.runtime import Runtime, current, is_initialized

CallEnd = Callable[[Sequence[torch.Tensor] | None], None]
"""Called when a call has ended, with the parameters outside of Blocks that it has read; None: it
has failed.
"""


class ModelsOfRun:
    """A run has one: ``current().state(ModelsOfRun)``."""

    def __init__(self, runtime: Runtime) -> None:
        self.at_calls: list[Callable[[nn.Module], CallEnd]] = []
        """Called when the call of an outermost bmt module begins, in training and evaluation, on
        every rank alike.
        """
        self.at_saves: list[Callable[[nn.Module], None]] = []
        """Called before a model is saved, on every rank alike."""
        self.parameters: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()
        """The distributed parameters that live, by ``id``."""
        self.scaled_losses = 0
        """How many losses ``OptimManager`` objects have scaled. Counted by them."""


def tell_of_save(model: nn.Module) -> None:
    """Tell those who keep parts of ``model`` that it is about to be saved. Collective."""
    for is_saved in current().state(ModelsOfRun).at_saves if is_initialized() else ():
        is_saved(model)
