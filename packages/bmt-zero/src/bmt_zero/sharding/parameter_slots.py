"""``ParameterSlots``: the entries of a block's modules that hold its parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.params.parameter import DistributedParameter


class Slot(NamedTuple):
    """Where a module keeps ``parameter``: ``holder[name]``, where ``holder`` is the module's ``_parameters``."""

    holder: dict[str, Any]
    name: str
    parameter: DistributedParameter


class SlotValues(NamedTuple):
    """The whole parameters that are put into a block's slots while it computes.

    ``own``: those that the block shards, in the order of its groups. ``foreign``: those that others shard, by the parameters' ids.
    """

    own: Sequence[torch.Tensor]
    foreign: Mapping[int, torch.Tensor]


class ParameterSlots:
    """Puts whole parameters into a block's modules while its forward or backward runs, and the sharded ones otherwise.

    Calls of one block may overlap (the block is used twice; a backward pass runs inside a forward). Each call puts its own whole
    parameters in, and the modules hold those put in last. The sharded parameters are back when all calls have taken theirs out.

    ``index_of``: the index of each of the block's own parameters, by id. ``attributes``: ``(layer.__dict__, name, value)`` to set
    on layers while whole parameters are in.
    """

    def __init__(
        self, slots: Sequence[Slot], index_of: Mapping[int, int], attributes: Sequence[tuple[dict[str, Any], str, Any]]
    ) -> None:
        self._slots = slots
        self._own = [(holder, name, index_of[id(p)]) for holder, name, p in slots if id(p) in index_of]
        self.foreign = [slot for slot in slots if id(slot.parameter) not in index_of]
        self._attributes = attributes
        self._inside: list[SlotValues] = []

    def put(self, whole: SlotValues) -> None:
        """Put ``whole`` into the modules."""
        self._inside.append(whole)
        self._show(whole)

    def take_out(self, whole: SlotValues) -> None:
        """Undo :meth:`put` of ``whole``. The modules then hold what is still put in, or the sharded parameters."""
        self._inside = [other for other in self._inside if other is not whole]
        self.show_present()

    def show_parameters(self) -> None:
        """Put the sharded parameters into the modules until :meth:`show_present`, to save or copy them."""
        for holder, name, parameter in self._slots:
            holder[name] = parameter
        for attributes, name, _ in self._attributes:
            attributes.pop(name, None)

    def show_present(self) -> None:
        """Put the whole parameters that were put in last back into the modules, or the sharded ones if there are none."""
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
        return not any(map(operator.is_not, found, [parameter for _, _, parameter in self._slots]))

    def _show(self, whole: SlotValues) -> None:
        own, foreign = whole
        for holder, name, index in self._own:
            holder[name] = own[index]
        for holder, name, parameter in self.foreign:
            holder[name] = foreign.get(id(parameter), parameter)
        for attributes, name, value in self._attributes:
            attributes[name] = value
