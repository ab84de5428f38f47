"""Whole parameters in a block's modules while its backward runs, for what backward calls again.

``torch.utils.checkpoint`` inside a block calls a part of the block's forward once more, in backward, when the modules hold shards
again. So a use of which such a part was seen gets whole parameters into the modules for as long as its backward runs. Linear
layers look whether they are inside of one, where others take what is saved, or gradients are off; in a block's first forward
all operations do (:class:`WatchForParts`). What is called again computes and saves what it did in forward. In a part that
``use_reentrant=True`` differentiates by itself, gradients arrive at these parameters, and are added to the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from bmt_zero.flat import FlatShard
    from bmt_zero.use import Use

Homes = Sequence[tuple[dict[str, Any], str, int]]


class Placement:
    """Leaves on the gathered parameters of one use, for the places of a block."""

    def __init__(self, flats: Sequence[FlatShard], homes: Homes) -> None:
        self._leaves = [
            view.detach().requires_grad_(parameter.requires_grad)
            for flat in flats
            for view, parameter in zip(flat.views(), flat.parameters, strict=True)
        ]
        self._homes = homes

    def put(self) -> None:
        """Put them in their places."""
        for holder, name, index in self._homes:
            holder[name] = self._leaves[index]

    def add_to(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``grads`` with what has arrived at the leaves added, which they give away."""
        summed = []
        for grad, leaf in zip(grads, self._leaves, strict=True):
            own, leaf.grad = leaf.grad, None
            summed.append(grad if own is None else own if grad is None else grad + own)
        return summed


class WatchForParts(TorchFunctionMode):
    """Inside, ``use`` is told when the tensors of an operation are saved by somebody else.

    That gradients are off says nothing here: so they are in the forward of any ``torch.autograd.Function``.
    """

    def __init__(self, use: Use) -> None:
        self._use = use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        if not torch.compiler.is_compiling() and present_hooks() != self._use.hooks:
            self._use.is_called_again = True
        return func(*args, **(kwargs or {}))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled. Under another mode it would be compiled once more."""
    # By its name: torch imports the compiler with the class.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


present_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Return who takes the tensors that are saved for backward, None if nobody does."""
