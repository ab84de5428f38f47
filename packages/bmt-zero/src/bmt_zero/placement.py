"""Whole parameters in a block's modules while its backward runs, for what backward calls again.

``torch.utils.checkpoint`` inside a block calls a part of the block's forward once more, in backward, when the modules hold shards
again. So a use of which such a part was seen gets whole parameters into the modules for as long as its backward runs. Linear
layers look whether they are inside of one, where others take what is saved, or gradients are off; in a block's first forward
every operation is looked at (:class:`WatchForParts`). What is called again computes and saves what it did in forward. In a part
that ``use_reentrant=True`` differentiates by itself, gradients arrive at these parameters, and are added to the block's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bmt_zero.nested import tensors_in

if TYPE_CHECKING:
    from bmt_zero.flat import FlatShard
    from bmt_zero.state import Place
    from bmt_zero.use import Use

Homes = Sequence[tuple[dict[str, Any], str, int]]


class Placement:
    """Leaves on the gathered parameters of one use, for the places of a block.

    Parameters that the block does not shard are those that forward found, ``gathered``. They are not gathered again, for
    forward may have called such a part on some ranks only.
    """

    def __init__(
        self, flats: Sequence[FlatShard], homes: Homes, foreign: Sequence[Place], gathered: dict[int, torch.Tensor]
    ) -> None:
        self._leaves = [
            view.detach().requires_grad_(parameter.requires_grad)
            for flat in flats
            for view, parameter in zip(flat.views(), flat.parameters, strict=True)
        ]
        self._homes = homes
        with torch.enable_grad():
            fulls = {id(p): p.gathered_as(gathered[id(p)]) for _, _, p in foreign if id(p) in gathered}
        self._foreign = [(holder, name, fulls[id(p)]) for holder, name, p in foreign if id(p) in fulls]

    def put(self) -> None:
        """Put them in their places."""
        for holder, name, index in self._homes:
            holder[name] = self._leaves[index]
        for holder, name, full in self._foreign:
            holder[name] = full

    def add_to(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return ``grads`` with what has arrived at the leaves added, which they give away."""
        summed = []
        for grad, leaf in zip(grads, self._leaves, strict=True):
            own, leaf.grad = leaf.grad, None
            summed.append(grad if own is None else own if grad is None else grad + own)
        return summed


class WatchForParts(TorchFunctionMode):
    """Inside, ``use`` is told when backward will call a part again.

    Then somebody else takes the tensors that are saved; or an ``autograd.Function`` uses, with gradients off, a parameter that
    it was not given. Other uses of a parameter while gradients are off count too: nothing tells them from the latter.
    """

    def __init__(self, use: Use, fulls: Sequence[torch.Tensor]) -> None:
        self._use = use
        self._fulls = {id(full): full for full in fulls}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and not self._use.is_called_again:
            if present_hooks() != self._use.hooks:
                self._use.is_called_again = True
            # To ask for a shape is no use of a tensor, to ask for its transpose is one.
            elif not torch.is_grad_enabled() and (func.__name__ != "__get__" or isinstance(result, torch.Tensor)):
                used = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._fulls]
                caller = sys._getframe(1)
                if used and caller.f_globals.get("__name__", "").partition(".")[0] != "bmt_zero":
                    given = _given(caller)
                    self._use.is_called_again = not all(any(tensor is other for other in given) for tensor in used)
        return result


def _given(frame: FrameType | None) -> list[Any]:
    """Return what the ``autograd.Function`` of the block was given in whose forward ``frame`` is, the outermost one."""
    given: list[Any] = []
    while frame is not None and frame.f_globals.get("__name__") != "bmt_zero.state":
        if frame.f_code is _APPLY:
            given = [*frame.f_locals["args"], *frame.f_locals["kwargs"].values()]
        frame = frame.f_back
    return given


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled. Under another mode it would be compiled once more."""
    # By its name: torch imports the compiler with the class.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


present_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Return who takes the tensors that are saved for backward, None if nobody does."""
