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
from bmt_core.run.runtime import CallEnd
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.schedule.root_group import RootCall, RootGroup


class OutsideParameters:
    """Follows the calls of outermost modules. A group lives as long as one of their modules, or a call, may use it."""

    def __init__(self, in_flight: ReductionsInFlight) -> None:
        self._in_flight = in_flight
        self._expected: weakref.WeakKeyDictionary[nn.Module, dict[bool, list[RootGroup]]] = weakref.WeakKeyDictionary()

    def call_begins(self, module: nn.Module) -> CallEnd:
        """Start to gather what the call of ``module`` is expected to read; return what is called at its end. Collective."""
        expected, has_grad = self._expected.setdefault(module, {}), torch.is_grad_enabled()
        known = expected.get(has_grad)
        if known != []:
            parameters = module.parameters() if known is None else [p for group in known for p in group.parameters]
            known = self._groups_of(parameters)
        call = RootCall(known) if known else None

        def end(read: Sequence[torch.Tensor] | None) -> None:
            if call is not None:
                call.end()
            if read is not None:
                expected[has_grad] = self._groups_of(read) if read else []

        return end

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[RootGroup]:
        """Return groups of exactly those of ``parameters`` that are outside of Blocks, new ones where there are none."""
        members: dict[RootGroup, list[DistributedParameter]] = {}
        alone: list[DistributedParameter] = []
        for p in dict.fromkeys(parameters):
            # Those that have to be gathered, and that no Block gathers.
            if isinstance(p, DistributedParameter) and p.is_sharded and not p._in_block:
                owner = owner_of(p)
                (members.setdefault(owner, []) if isinstance(owner, RootGroup) else alone).append(p)
        groups = [g for g, own in members.items() if len(own) == len(g.parameters) and not g.data.is_memory_replaced]
        divided = [group for group in members if group not in groups]
        groups += self._formed([*alone, *(p for group in divided for p in members[group])])
        for group in divided:  # the others lie close together again, and are in no group until they are read
            self._formed([p for p in group.parameters if owner_of(p) is group])
        return groups

    def _formed(self, parameters: Sequence[DistributedParameter]) -> list[RootGroup]:
        kinds: dict[object, list[DistributedParameter]] = {}
        for p in parameters:
            kinds.setdefault((p.shard_group.ranks, p.dtype, p.device), []).append(p)
        with torch.inference_mode(False), torch.no_grad():
            return [RootGroup(members, self._in_flight) for members in kinds.values()]
