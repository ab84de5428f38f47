"""``WholeParameters``: distributed parameters that are whole while code that initialises them runs.

[Note: whole while it is written] Code that initialises (``reset_parameters``, ``_init_weights``, a function of the user's)
expects whole parameters and reaches them in any way: as attributes, by ``parameters()``, through ``.data``, one module
on behalf of another. So nothing is put in their place beforehand. While such code runs, a mode sees the arguments of
every torch function, and a distributed parameter among them becomes whole there and then: the same object, with a whole
tensor for its data. What has no values starts as NaN, which tells later what was written; what has some is gathered, as
code may read it. When it is released it has its part again, with this rank's share of what was written. Every rank draws
all numbers; nothing is communicated, unless something is touched that was released before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter, lend_data
from bmt_core.params.uninitialized import can_hold_nan, fill_with_nan, has_nan, has_values, mark_uninitialized


class _Whole(NamedTuple):
    parameter: DistributedParameter
    part: torch.Tensor
    is_kept: bool  # whether what is written to it is
    had_values: bool
    version: int  # before anything was written


class WholeParameters(TorchFunctionMode):
    """Lets code that runs while this mode is entered write to ``targets`` as whole tensors.

    Other parameters become whole too, and stay what they are. At most ``budget`` bytes are whole at a time, or one
    parameter that is larger.
    """

    def __init__(self, targets: Iterable[DistributedParameter], *, budget: int) -> None:
        super().__init__()
        self._targets = {id(parameter) for parameter in targets}
        self._budget = budget
        self._filled: set[int] = set()
        self._written: set[int] = set()
        self._settled: set[int] = set()
        self._held: dict[int, _Whole] = {}
        self._piece: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, DistributedParameter) and id(value) not in self._held:
                self._hold(value)
        return func(*args, **(kwargs or {}))

    def begin_visit(self) -> None:
        """The next module's turn: nothing is written yet."""
        self._written = set()

    def begin_call(self, module: nn.Module) -> None:
        """``module`` is to be initialised: what its own parameters have got before, by whomever, they keep."""
        self._settled = {id(p) for p in module._parameters.values() if p is not None and id(p) in self._filled}
        for key in self._settled & self._held.keys():
            self._release(key)

    def end_call(self) -> None:
        """See what was written."""
        for key, held in self._held.items():
            self._look(key, held)
        for key in self._settled & self._held.keys():
            self._release(key)
        self._settled = set()

    def lacks_values(self, module: nn.Module) -> bool:
        """Whether a parameter of ``module`` itself was not written in this visit."""
        return any(id(p) in self._targets and id(p) not in self._written for p in module._parameters.values())

    def release_all(self) -> None:
        """Give every parameter its part again."""
        while self._held:
            self._release(next(iter(self._held)))

    def _hold(self, parameter: DistributedParameter) -> None:
        key = id(parameter)
        is_kept = key in self._targets and key not in self._settled
        if is_kept and parameter.local_axes:
            raise ConfigError(
                f"A parameter of shape {tuple(parameter.full_shape)} is a tensor-parallel slice, and a module that"
                " initialises it would draw the same slice on every rank. Give it an init_method."
            )
        while self._held and sum(_bytes(held) for held in self._held.values()) + whole_bytes(parameter) > self._budget:
            self._release(next(iter(self._held)))
        part = parameter.data
        whole = torch.empty(parameter.full_shape, dtype=parameter.dtype, device=parameter.device)
        had_values = has_values(
            parameter
        )  # the same on every rank: see [Note: uninitialized tensors] in bmt_core.params.uninitialized
        if had_values:
            self._gather(parameter, whole)
        else:
            fill_with_nan(whole)
        lend_data(parameter, whole)
        self._held[key] = _Whole(parameter, part, is_kept, had_values, parameter._version)

    def _gather(self, parameter: DistributedParameter, whole: torch.Tensor) -> None:
        # Every element is zero on all ranks but one. gather_like() would need memory for many parts beside the whole; and
        # a communicator may hold what it is given for a moment after its work, so it gets small pieces, in one buffer.
        parameter.local_part(whole.zero_()).copy_(parameter.detach())
        if parameter.replicas == parameter.group.size:
            return
        if self._piece is None:
            length = min(_LONGEST_PIECE, max(_SHORTEST_PIECE, self._budget // 16)) // 16 * 16
            self._piece = torch.empty(length, dtype=torch.uint8, device=whole.device)
        buffer = self._piece.view(whole.dtype)
        for piece in torch.split(whole.view(-1), len(buffer)):
            summed = buffer[: len(piece)].copy_(piece)
            parameter.group.all_reduce(summed).wait()
            piece.copy_(summed)

    def _release(self, key: int) -> None:
        held = self._held.pop(key)
        self._look(key, held)
        whole = held.parameter.detach()
        lend_data(held.parameter, held.part)
        if held.is_kept and key in self._filled:
            held.part.copy_(held.parameter.local_part(whole))
        elif not held.had_values:
            mark_uninitialized(held.parameter)  # again, as its version has moved

    def _look(self, key: int, held: _Whole) -> None:
        if held.is_kept and key in self._filled:
            return
        parameter = held.parameter
        if held.had_values or not can_hold_nan(parameter):
            is_written = parameter._version != held.version
        else:
            is_written = not has_nan(parameter)
        if is_written:
            self._written.add(key)
            if held.is_kept:
                self._filled.add(key)


def whole_bytes(parameter: DistributedParameter) -> int:
    """Bytes of the whole ``parameter``."""
    return parameter.full_shape.numel() * parameter.dtype.itemsize


def _bytes(held: _Whole) -> int:
    return whole_bytes(held.parameter)


_SHORTEST_PIECE, _LONGEST_PIECE = 2**8, 2**24  # bytes
