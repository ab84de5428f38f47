"""``ParameterSlots``: where a block's modules hold their parameters, and what is put there while it
computes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_params.parameter import DistributedParameter
from bmt_params.user_attributes import UserAttributes


def slots_of(block: nn.Module) -> Iterator[Slot]:
    """Yield every slot of a parameter in ``block``, except inside blocks that are nested in it."""
    pending = [block]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen or ("_bmt_block" in module.__dict__ and module is not block):
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                raise ConfigError(
                    f"Parameter {name!r} of a Block was replaced by a plain tensor (by"
                    " functional_call?), which would not be sharded. Assign an nn.Parameter, or"
                    " call the module before it becomes a Block."
                )
            if parameter is not None:
                yield Slot(module._parameters, name, parameter)  # type: ignore[arg-type]
        pending += [child for child in module._modules.values() if child is not None]


class Slot(NamedTuple):
    """Where a module keeps ``parameter``: ``holder[name]``, where ``holder`` is the
    module's ``_parameters``.
    """

    holder: dict[str, Any]
    name: str
    parameter: DistributedParameter


class SlotValues(NamedTuple):
    """The whole parameters that are put into a block's slots while it computes.

    ``own``: those that the block shards, in the order of its groups. ``foreign``: those that others
    shard, by the parameters' ids.
    """

    own: Sequence[torch.Tensor]
    foreign: Mapping[int, torch.Tensor]


class ParameterSlots:
    """Puts whole parameters into a block's modules while its forward or backward runs, and the
    sharded ones otherwise.

    Calls of one block may overlap (the block is used twice; a backward pass runs inside a forward).
    Each call puts its own whole parameters in, and the modules hold those put in last. The sharded
    parameters are back when all calls have taken theirs out. A slot in which user code has put
    something else meanwhile stays as it is: the next call takes that over.

    ``index_of``: the index of each of the block's own parameters, by id. ``attributes``:
    ``(layer.__dict__, name, value)`` to set on layers while whole parameters are in.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        index_of: Mapping[int, int],
        attributes: Sequence[tuple[dict[str, Any], str, Any]],
    ) -> None:
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._index = [index_of.get(id(parameter), -1) for parameter in self._parameters]
        self.foreign = [slot for slot in slots if id(slot.parameter) not in index_of]
        self._attributes = attributes
        self._user_attributes = UserAttributes(self._parameters)
        # Changed by each call: the whole parameters of all calls, and what each slot was given
        # last.
        self._inside: list[SlotValues] = []
        self._given: list[torch.Tensor] = list(self._parameters)

    def put(self, whole: SlotValues) -> None:
        """Put ``whole`` into the modules. Each tensor gets the attributes that the program has set
        on its parameter.
        """
        self._inside.append(whole)
        self._show(whole)
        self._user_attributes.copy_to(self._given)

    def take_out(self, whole: SlotValues) -> None:
        """Undo :meth:`put` of ``whole``. The modules then hold what is still put in, or the
        sharded parameters.
        """
        if self._inside[-1] is whole:
            del self._inside[-1]
        else:
            self._inside = [other for other in self._inside if other is not whole]
        self.show_present()

    def show_parameters(self) -> None:
        """Put the sharded parameters into the modules until :meth:`show_present`, to save or
        copy them.
        """
        given = self._given
        for number, (holder, name, parameter) in enumerate(self._slots):
            if name in holder and holder[name] is given[number]:
                holder[name] = parameter
            given[number] = parameter
        for attributes, name, value in self._attributes:
            if name in attributes and attributes[name] is value:
                del attributes[name]

    def show_present(self) -> None:
        """Put the whole parameters that were put in last back into the modules, or the sharded ones
        if there are none.
        """
        if self._inside:
            self._show(self._inside[-1])
        else:
            self.show_parameters()

    @property
    def are_whole(self) -> bool:
        """Whether whole parameters are in the modules."""
        return bool(self._inside)

    @property
    def are_untouched(self) -> bool:
        """Whether the modules hold exactly the parameters of the slots: nobody has replaced one."""
        found = [holder.get(name) for holder, name, _ in self._slots]
        return not any(map(operator.is_not, found, self._parameters))

    def _show(self, whole: SlotValues) -> None:
        own, foreign = whole
        given = self._given
        for number, (holder, name, parameter) in enumerate(self._slots):
            index = self._index[number]
            value = own[index] if index >= 0 else foreign.get(id(parameter), parameter)
            if name in holder and holder[name] is given[number]:
                holder[name] = value
            given[number] = value
        for attributes, name, value in self._attributes:
            if name not in attributes:
                attributes[name] = value
