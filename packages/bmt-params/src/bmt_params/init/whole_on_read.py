"""``WholeOnRead``: while modules initialise themselves, they see whole parameters and not this
rank's parts.

[Note: whole while initialised] ``reset_parameters()``, ``_init_weights()`` and users' functions
write to whole parameters, and not only to those of one module: a model may initialise all of its
layers again. So while a model is initialised, its modules hold their parameters in dictionaries
that make a parameter whole when it is read. The parameter stays the same object, and its data
becomes a whole tensor. If the parameter has values, they are gathered; if not, the tensor is filled
with NaN, and NaN that is left shows where nothing was written. At the end of the Block, or when
other parameters need the memory, this rank copies its part back.

The data of a parameter that is not whole is a placeholder: one element, expanded to the whole
shape. Code that kept a reference to the parameter and writes to it then gets an error, from torch
or because the parameter's version has changed.

Every rank draws all numbers, also for a parameter of which it has a slice. Nothing is communicated,
except values that are read again after their Block.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.torch_internals import set_data
from bmt_params.guards.first_values import FirstValues
from bmt_params.parameter import DistributedParameter, note_whole_values
from bmt_params.uninitialized import (
    can_hold_nan,
    fill_with_nan,
    has_nan,
    has_values,
    mark_uninitialized,
)


@dataclass(slots=True)
class _State:
    name: str
    part: torch.Tensor
    is_target: bool
    has_values: bool  # of the part, or of the whole tensor while there is one
    version: int = 0  # of the parameter, when its data was last replaced


class WholeOnRead:
    """Inside ``with``, distributed parameters of ``model`` become whole when code run by
    :meth:`call` reads them.

    Only ``targets``, which have no values before, keep what is written to them. The memory for
    whole parameters is at most that of a forward pass: one Block, or all parameters outside
    of Blocks.
    """

    def __init__(self, model: nn.Module, targets: Iterable[DistributedParameter]) -> None:
        wanted = set(targets)
        self._states = {
            parameter: _State(name, parameter.data, parameter in wanted, has_values(parameter))
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DistributedParameter)
        }
        self._own: dict[nn.Module, list[Any]] = {
            m: [p for p in m._parameters.values() if p in self._states] for m in model.modules()
        }
        self._budget = _largest_unit(model)
        self._whole: dict[Any, _State] = {}  # in the order in which they became whole
        self._settled: set[Any] = set()  # parameters that the current call must not change

    def __enter__(self) -> WholeOnRead:
        for module in self._own:
            module.__dict__["_parameters"] = _WholeWhenRead(module, self._read)
        for parameter, state in self._states.items():
            parameter._is_lent = True
            _lend_placeholder(parameter, state)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for module in self._own:
            module.__dict__["_parameters"] = module.__dict__["_parameters"].data
        # Found before the parts are put back, which changes versions.
        lost = [
            state.name
            for p, state in self._states.items()
            if p not in self._whole and p._version != state.version
        ]
        for parameter, state in self._states.items():
            set_data(parameter, state.part)
            parameter._is_lent = False
            # Still whole after an error.
            if not state.has_values or (state.is_target and parameter in self._whole):
                mark_uninitialized(parameter)  # again: set_data changed its version
            current().state(FirstValues).settle(parameter)
        if lost and error is None:
            raise _not_whole(", ".join(lost))

    def call(self, init: Callable[[nn.Module], Any], module: nn.Module) -> set[Any]:
        """Call ``init(module)``. Return the targets among the parameters of ``module`` itself to
        which ``init`` did not write.

        Parameters of ``module`` itself that have values before the call keep them.
        """
        own = self._own[module]
        settled = {parameter for parameter in own if self._has_values(parameter)}
        # What they have is kept now; what init writes to them is dropped below.
        self.shard(settled)
        self._settled = settled
        try:
            init(module)
        except RuntimeError as error:
            if _WRITE_TO_EXPANDED in str(error):
                raise _not_whole(f"a parameter, by {type(module).__name__},") from error
            raise
        written = {p for p in own if (self._is_written(p) if p in settled else self._has_values(p))}
        self.shard(settled)
        self._settled = set()
        return {parameter for parameter in own if self._states[parameter].is_target} - written

    def shard(self, parameters: Iterable[Any] | None = None) -> None:
        """Copy back this rank's part of ``parameters`` (default: all that are whole), and free the
        whole tensors.
        """
        for parameter in [
            p for p in (self._whole if parameters is None else parameters) if p in self._whole
        ]:
            state = self._whole[parameter]
            if state.is_target and self._has_values(parameter) and parameter not in self._settled:
                state.part.copy_(parameter.local_part(parameter.own_slice(parameter.detach())))
                note_whole_values(parameter, parameter.detach(), version=None)
            del self._whole[parameter]
            _lend_placeholder(parameter, state)

    def _read(self, parameter: nn.Parameter | None) -> None:
        """Make ``parameter`` whole, if it is distributed. Collective if it has values."""
        if not isinstance(parameter, DistributedParameter) or parameter in self._whole:
            return
        state = self._states[parameter]
        if parameter._version != state.version:
            raise _not_whole(state.name)
        while self._whole and sum(map(_bytes, [parameter, *self._whole])) > self._budget:
            self.shard([next(iter(self._whole))])
        whole = torch.empty(parameter.whole_shape, dtype=parameter.dtype, device=parameter.device)
        if state.has_values:  # on every rank or on none: see [Note: uninitialized tensors]
            _gather(parameter, state.part, whole)
        else:
            fill_with_nan(whole)
        set_data(parameter, whole)
        state.version = parameter._version
        self._whole[parameter] = state

    def _has_values(self, parameter: DistributedParameter) -> bool:
        state = self._states[parameter]
        if state.is_target and not state.has_values:
            state.has_values = self._is_written(parameter)
        return state.has_values

    def _is_written(self, parameter: DistributedParameter) -> bool:
        state = self._whole.get(parameter)
        if state is None:
            return False
        if state.has_values or not can_hold_nan(parameter):
            return parameter._version != state.version
        return not has_nan(parameter)


class _WholeWhenRead(UserDict[str, Any]):
    """The parameters of ``module``, in place of its ``_parameters``: each is passed to ``read``
    before it is returned.
    """

    def __init__(self, module: nn.Module, read: Callable[[Any], None]) -> None:
        self.data = module._parameters
        self._owner = type(module).__name__
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read(self.data[name])
        return self.data[name]

    def __setitem__(self, name: str, parameter: Any) -> None:
        if parameter is not self.data.get(name):
            raise ConfigError(
                f"The initialisation of {self._owner} gave it other parameters than it had, which"
                " would not be sharded. Write to the parameters that are there:"
                f" torch.nn.init.normal_(self.{name}), say."
            )


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` is a Block: all its parameters, at any depth, are sharded and gathered as
    one unit.
    """
    return bool(getattr(type(module), "_bmt_shards_as_one", False))


def _largest_unit(model: nn.Module) -> int:
    """Bytes of the largest Block, or of all parameters outside of Blocks if that is more."""
    blocks = [set(module.parameters()) for module in model.modules() if is_block(module)]
    outside = set(model.parameters()).difference(*blocks)
    return max(
        sum(_bytes(p) for p in unit if isinstance(p, DistributedParameter))
        for unit in [outside, *blocks]
    )


def _bytes(parameter: DistributedParameter) -> int:
    return parameter.whole_shape.numel() * parameter.dtype.itemsize


def _gather(parameter: DistributedParameter, part: torch.Tensor, whole: torch.Tensor) -> None:
    if whole.shape != parameter.full_shape:
        whole.copy_(parameter.gather_all_like(part))
        return
    # As a sum of bytes, each of which is zero on all ranks but one: gather_like() would need memory
    # for all parts beside the whole tensor. In small pieces, through one buffer, because a
    # communicator may keep its input for a moment.
    parameter.local_part(whole.zero_()).copy_(part)
    if not parameter.is_sharded:
        return
    everything = whole.view(-1).view(torch.uint8)
    buffer = torch.empty_like(everything[: min(2**24, max(2**8, len(everything) // 16))])
    for piece in torch.split(everything, len(buffer)):
        summed = buffer[: len(piece)].copy_(piece)
        parameter.shard_group.all_reduce(summed).wait()
        piece.copy_(summed)


def _lend_placeholder(parameter: DistributedParameter, state: _State) -> None:
    element = fill_with_nan(torch.empty((), dtype=parameter.dtype, device=parameter.device))
    set_data(parameter, element.expand(parameter.whole_shape))
    state.version = parameter._version


def _not_whole(what: str) -> ConfigError:
    return ConfigError(
        f"Initialisation wrote to {what} when it was not whole. A parameter becomes whole when it"
        " is read from its module (module.weight, model.parameters()), and stays so until other"
        " Blocks are read: read it again before you write to it."
    )


_WRITE_TO_EXPANDED = (
    "more than one element of the written-to tensor refers to a single memory location"
)
