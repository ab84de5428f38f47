"""``ParameterSlots``: the places in a block's modules where parameters are found."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.params.parameter import DistributedParameter


class Slot(NamedTuple):
    """Where a module keeps a parameter: ``holder[name]``, its ``_parameters``."""

    holder: dict[str, Any]
    name: str
    parameter: DistributedParameter


class WholeParameters(NamedTuple):
    """What is put into the slots while a block computes.

    ``own``: the parameters that the block shards, in the order of its groups; ``foreign``: the others, by the parameters' ids.
    """

    own: Sequence[torch.Tensor]
    foreign: Mapping[int, torch.Tensor]


class ParameterSlots:
    """Holds the sharded parameters while a block rests, and whole ones while its forward or its backward runs.

    Calls of one block may overlap (it is used twice, a backward pass runs inside of a forward): each puts its own whole
    parameters in, the last ones are what modules find, and the parameters are back when all are taken out.

    ``index_of``: which of the block's own parameters the one with that id is. ``attributes``: ``(layer.__dict__, name, value)`` of
    what is set on layers as long as whole parameters are in.
    """

    def __init__(
        self, slots: Sequence[Slot], index_of: Mapping[int, int], attributes: Sequence[tuple[dict[str, Any], str, Any]]
    ) -> None:
        self._slots = slots
        self._own = [(holder, name, index_of[id(p)]) for holder, name, p in slots if id(p) in index_of]
        self.foreign = [slot for slot in slots if id(slot.parameter) not in index_of]
        self._attributes = attributes
        self._inside: list[WholeParameters] = []

    def put(self, whole: WholeParameters) -> None:
        """Put ``whole`` into the modules."""
        self._inside.append(whole)
        self._show(whole)

    def take_out(self, whole: WholeParameters) -> None:
        """Undo :meth:`put`: others that were put in, or the parameters, take the place of ``whole``."""
        self._inside = [other for other in self._inside if other is not whole]
        self.show_present()

    def show_parameters(self) -> None:
        """Put the parameters themselves into the modules, until :meth:`show_present`, to save or copy them."""
        for holder, name, parameter in self._slots:
            holder[name] = parameter
        for attributes, name, _ in self._attributes:
            attributes.pop(name, None)

    def show_present(self) -> None:
        """Put into the modules what was put in last, or the parameters if nothing is."""
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
        """Whether the modules hold the parameters, and nobody has put others in their places."""
        found = [holder.get(name) for holder, name, _ in self._slots]
        return not any(map(operator.is_not, found, [parameter for _, _, parameter in self._slots]))

    def _show(self, whole: WholeParameters) -> None:
        own, foreign = whole
        for holder, name, index in self._own:
            holder[name] = own[index]
        for holder, name, parameter in self.foreign:
            holder[name] = foreign.get(id(parameter), parameter)
        for attributes, name, value in self._attributes:
            attributes[name] = value
