"""``OutsideParameters``: groups of parameters outside of Blocks, and their gathers at the beginning of each outermost call.

[Note: reads that are expected] For each outermost module, the groups that a call has read are remembered, separately for calls with
and without gradients. The next such call gathers these groups when it begins (the first call gathers all parameters of the module),
so that they are there, or arriving, when they are read. If a call has read only some parameters of a group, the group is divided;
this moves memory and communicates nothing. A parameter that was not expected is gathered alone, and with a group in the next call.
Every rank reads the same parameters, so every rank forms the same groups. Parameters that several Blocks share stay expected: a
Block reads them on every rank, but may use them on some ranks only, and the gradient of a parameter that was gathered alone is
reduced only by ranks that used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from bmt_core.params.owner import owner_of
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import CallEnd
from bmt_zero.gradients.ledger import ReductionsInFlight
from bmt_zero.schedule.root_group import RootCall, RootGroup


class OutsideParameters:
    """Observes the calls of outermost modules. A group lives as long as a remembered module or a call may use it."""

    def __init__(self, in_flight: ReductionsInFlight) -> None:
        self._in_flight = in_flight
        self._expected: weakref.WeakKeyDictionary[nn.Module, dict[bool, list[RootGroup]]] = weakref.WeakKeyDictionary()

    def call_begins(self, module: nn.Module) -> CallEnd:
        """Start to gather the parameters that a call of ``module`` will probably read; return the end of the call. Collective."""
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
                shared = [p for group in known or () for p in group.parameters if p._shared]
                expected[has_grad] = self._groups_of([*read, *shared])

        return end

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[RootGroup]:
        """Return groups of exactly those ``parameters`` that are outside of Blocks. New groups are made if necessary."""
        members: dict[RootGroup, list[DistributedParameter]] = {}
        alone: list[DistributedParameter] = []
        for p in dict.fromkeys(parameters):
            # Only parameters that must be gathered, and not by a Block.
            if isinstance(p, DistributedParameter) and p.is_sharded and not p._in_block:
                owner = owner_of(p)
                (members.setdefault(owner, []) if isinstance(owner, RootGroup) else alone).append(p)
        groups = [g for g, own in members.items() if len(own) == len(g.parameters) and not g.data.is_memory_replaced]
        divided = [group for group in members if group not in groups]
        groups += self._formed([*alone, *(p for group in divided for p in members[group])])
        for group in divided:  # its other parameters move to memory without gaps, and get a group when they are read
            self._formed([p for p in group.parameters if owner_of(p) is group])
        return groups

    def _formed(self, parameters: Sequence[DistributedParameter]) -> list[RootGroup]:
        kinds: dict[object, list[DistributedParameter]] = {}
        for p in parameters:
            kinds.setdefault((p.shard_group.ranks, p.dtype, p.device), []).append(p)
        with torch.inference_mode(False), torch.no_grad():
            return [RootGroup(members, self._in_flight) for members in kinds.values()]
