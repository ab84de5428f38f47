"""``OutsideParameters``: which groups the parameters outside of Blocks form, and which of them a call has gathered.

[Note: reads that are expected] Which groups a call read from is remembered with its outermost module, once for calls with
gradients and once for those without. The next such call gathers them when it begins (the first: all that the module holds),
so that they are there, or on their way, when they are read. A group of which a call has read only some parameters is
divided: memory moves, nothing is communicated. What was not expected is gathered by itself, and in a group the next time.
Every rank reads the same, so every rank forms the same groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from bmt_core.params.owner import owner_of
from bmt_core.params.parameter import DistributedParameter
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.schedule.root_group import RootCall, RootGroup


class OutsideParameters:
    """Follows the calls of outermost modules. A group lives as long as one of their modules, or a call, may use it."""

    def __init__(self, in_flight: ReductionsInFlight) -> None:
        self._in_flight = in_flight
        self._expected: weakref.WeakKeyDictionary[nn.Module, dict[bool, list[RootGroup]]] = weakref.WeakKeyDictionary()
        self._calls: list[
            RootCall
        ] = []  # under way; a backward pass inside of one may begin another, on its own thread

    def call_begins(self, module: nn.Module) -> None:
        """Start to gather what the call of ``module`` is expected to read. Collective."""
        known = self._expected.setdefault(module, {}).get(torch.is_grad_enabled())
        expected = module.parameters() if known is None else [p for group in known for p in group.parameters]
        self._calls.append(RootCall(self._groups_of(expected)))

    def call_ends(self, module: nn.Module, read: Sequence[torch.Tensor] | None) -> None:
        """Remember what was ``read``; None: the call has failed."""
        call = self._calls.pop()
        call.end()
        if read is None:
            return
        ids = {id(parameter) for parameter in read}
        divided = [self._formed(part) for group in call.groups for part in _divided(group, ids)]
        self._expected[module][torch.is_grad_enabled()] = self._groups_of(read)
        del divided  # kept until here: what nobody reads is in no group, but close together

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[RootGroup]:
        """Return the groups of those of ``parameters`` that are outside of Blocks. New ones are formed where there are none."""
        members: dict[RootGroup | None, list[DistributedParameter]] = {}
        for parameter in parameters:
            if isinstance(parameter, DistributedParameter) and _is_outside(parameter):
                owner = owner_of(parameter)
                members.setdefault(owner if isinstance(owner, RootGroup) else None, []).append(parameter)
        groups = [group for group in members if group is not None and group.is_intact]
        return groups + self._formed([p for group, own in members.items() if group not in groups for p in own])

    def _formed(self, parameters: Sequence[DistributedParameter]) -> list[RootGroup]:
        kinds: dict[object, list[DistributedParameter]] = {}
        for p in dict.fromkeys(parameters):
            kinds.setdefault((p.group.ranks, p.dtype, p.device), []).append(p)
        with torch.inference_mode(False), torch.no_grad():
            return [RootGroup(members, self._in_flight) for members in kinds.values()]


def _divided(group: RootGroup, read: set[int]) -> list[list[DistributedParameter]]:
    """Return the parameters of ``group`` that were read and those that were not, if there are both."""
    parts = [[p for p in group.parameters if (id(p) in read) is is_read] for is_read in (True, False)]
    return parts if all(parts) else []


def _is_outside(parameter: DistributedParameter) -> bool:
    """Whether the parameter has to be gathered, and no Block does it."""
    return parameter.group.size > 1 and not parameter._shard.replicated and not parameter._in_block
