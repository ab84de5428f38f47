"""``RootGroup``: parameters outside of all Blocks, gathered in one all-gather when the outermost
module is called.

[Note: gradients that are missing] In plain torch a parameter that the loss does not depend on has
no gradient. Which parameters these are may depend on a rank's data, but an optimizer must step the
parts of a parameter on all ranks or on none. So each rank sends, with its gradients, a flag per
parameter: whether it has a gradient. The host reads the summed flags only if one of its own
gradients is missing.

[Note: reads that are expected] For each outermost module, the groups that a call has read are
remembered, separately for calls with and without gradients. The next such call gathers these groups
when it begins (the first call gathers all parameters of the module), so that they are there, or
arriving, when they are read. If a call has read only some parameters of a group, the group is
divided; this moves memory and communicates nothing. A parameter that was not expected is gathered
alone, and with a group in the next call. Every rank reads the same parameters, so every rank forms
the same groups. Parameters that several Blocks share stay expected: a Block reads them on every
rank, but may use them on some ranks only, and the gradient of a parameter that was gathered alone
is reduced only by ranks that used it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from bmt_core.run.runtime import current
from bmt_core.torch_internals import accumulates, when_backward_ends, without_torch_functions
from bmt_params.models_of_run import CallEnd
from bmt_params.parameter import DistributedParameter
from bmt_params.uninitialized import UNINITIALIZED, has_values
from bmt_zero.flat_parameters import RankMajorParameters
from bmt_zero.gradient_ledger import ReductionsInFlight
from bmt_zero.parameter_group import Lease, ParameterGroup

_numbers = itertools.count()


class RootGroup(ParameterGroup):
    """``parameters`` of one dtype, sharded over the same ranks, that calls of an outermost
    module read.
    """

    flat: RankMajorParameters

    def __init__(
        self, parameters: Sequence[DistributedParameter], in_flight: ReductionsInFlight
    ) -> None:
        reduce_dtype = current().settings.reduce_dtype
        super().__init__(
            RankMajorParameters(parameters),
            level=3,
            reduce_dtype=reduce_dtype,
            name="root",
            in_flight=in_flight,
        )
        self.call: RootCall | None = None

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.call is None or self.data.is_memory_replaced:
            return None
        # The caller's own gather raises the error about missing values.
        if UNINITIALIZED in vars(parameter) and not has_values(parameter):
            return None
        return self.call.read(parameter)

    def reduce_whole(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Reduce the ``needed`` gradients among ``grads``. Return those that go to autograd and not
        into ``.grad``. Collective.
        """
        accumulated = [
            need and accumulates(p) for need, p in zip(needed, self.parameters, strict=True)
        ]
        # If no leaf accumulates, torch.autograd.grad() asks, which returns all gradients.
        into_grad = True in accumulated
        needed = accumulated if into_grad else needed
        grads = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
        is_missing = any(need and grad is None for need, grad in zip(needed, grads, strict=True))
        self.ledger.in_flight.make_room()
        full = self.flat.rows_of(grads, self.ledger.wire_dtype)
        if into_grad:
            when_backward_ends(self._finish)
        # See [Note: gradients that are missing].
        # Ranks may differ in this: it says when the host waits, and changes no collective.
        present = self.flat.present if is_missing else None
        return self.end_gradients(full, needed, into_grad=into_grad, present=present)

    def _finish(self) -> None:
        with without_torch_functions():
            self.ledger.end_pass()
        self.ledger.in_flight.wait()


class RootCall:
    """One call of an outermost module, for which ``groups`` are gathered, and its backward. Making
    it is collective.

    One autograd node has the parameters of all groups, so its backward runs if any of them
    was used.
    """

    def __init__(self, groups: Sequence[RootGroup]) -> None:
        self.groups = groups
        self._lease: Lease = "call", next(_numbers)
        self._mode = _mode()
        self._was_read: set[int] = set()
        self._wholes: dict[int, torch.Tensor] = {}
        # The program may write to a parameter inside of the call: then it is gathered again.
        self._versions = {id(p): p._version for group in groups for p in group.parameters}
        for group in groups:
            group.call = self  # RootGroup.read() finds it; an inner call takes its place
            group.ledger.notice_cleared()
            group.look_for_changes()
            group.start_gather(self._lease)

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the whole ``parameter``; None if it, or torch's grad or inference mode, has
        changed since the call began.
        """
        key = id(parameter)
        if self._mode != _mode() or self._versions[key] != parameter._version:
            return None
        if not self._wholes:
            # Another call inside of this one may have used the groups.
            if any(group.call is not self for group in self.groups):
                return None
            parameters = [p for group in self.groups for p in group.parameters]
            wholes = _GatherGroups.apply(self.groups, self._lease, self._was_read, *parameters)  # type: ignore[no-untyped-call]
            self._wholes = {id(p): whole for p, whole in zip(parameters, wholes, strict=True)}
        self._was_read.add(key)
        return self._wholes[key]

    def end(self) -> None:
        """End the call, and free parameters that it has not read."""
        self._wholes = {}
        for group in self.groups:
            if group.call is self:
                group.call = None
                group.wait()  # memory that a gather still writes must not be freed
            group.buffer.give_back(self._lease)


class _GatherGroups(torch.autograd.Function):
    """(groups, lease, ids of parameters read until backward, parts…) -> whole parameters…"""

    @staticmethod
    def forward(
        ctx: Any,
        groups: Sequence[RootGroup],
        lease: Lease,
        was_read: Container[int],
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # None tells a missing gradient from zeros.
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.was_read = groups, was_read
        wholes: list[torch.Tensor] = []
        for group in groups:
            group.wait()
            wholes += group.views()
            group.buffer.give_back(lease)  # the views are copies
        ctx.mark_non_differentiable(
            *[whole for whole, p in zip(wholes, parts, strict=True) if not p.requires_grad]
        )
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[3:]
        results: list[torch.Tensor | None] = []
        with without_torch_functions():
            for group in ctx.groups:
                own = slice(len(results), len(results) + len(group.parameters))
                pairs = zip(needed[own], group.parameters, strict=True)
                of_group = [need and id(p) in ctx.was_read for need, p in pairs]
                results += (
                    group.reduce_whole(grads[own], of_group)
                    if True in of_group
                    else [None] * len(of_group)
                )
        return None, None, None, *results


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


class OutsideParameters:
    """Observes the calls of outermost modules. A group lives as long as a remembered module or a
    call may use it.
    """

    def __init__(self, in_flight: ReductionsInFlight) -> None:
        self._in_flight = in_flight
        self._expected: weakref.WeakKeyDictionary[nn.Module, dict[bool, list[RootGroup]]] = (
            weakref.WeakKeyDictionary()
        )

    def call_begins(self, module: nn.Module) -> CallEnd:
        """Start to gather the parameters that a call of ``module`` will probably read; return the
        end of the call. Collective.
        """
        expected, has_grad = self._expected.setdefault(module, {}), torch.is_grad_enabled()
        known = expected.get(has_grad)
        if known != []:
            parameters = (
                module.parameters()
                if known is None
                else [p for group in known for p in group.parameters]
            )
            # Again, because memory may have been replaced, or a call of another module may have
            # divided a group.
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
        """Return groups of exactly those ``parameters`` that are outside of Blocks. New groups are
        made if necessary.
        """
        members: dict[RootGroup, list[DistributedParameter]] = {}
        alone: list[DistributedParameter] = []
        for p in dict.fromkeys(parameters):
            # Only parameters that must be gathered, and not by a Block.
            if isinstance(p, DistributedParameter) and p.is_sharded and not p._in_block:
                owner = p._owner
                (members.setdefault(owner, []) if isinstance(owner, RootGroup) else alone).append(p)
        groups = [
            g
            for g, own in members.items()
            if len(own) == len(g.parameters) and not g.data.is_memory_replaced
        ]
        divided = [group for group in members if group not in groups]
        groups += self._formed([*alone, *(p for group in divided for p in members[group])])
        # Its other parameters move to memory without gaps, and get a group when they are read.
        for group in divided:
            self._formed([p for p in group.parameters if p._owner is group])
        return groups

    def _formed(self, parameters: Sequence[DistributedParameter]) -> list[RootGroup]:
        kinds: dict[object, list[DistributedParameter]] = {}
        for p in parameters:
            kind = p.shard_group.ranks, p.shard.replicas, p.dtype, p._compute_dtype, p.device
            kinds.setdefault(kind, []).append(p)
        with torch.inference_mode(False), torch.no_grad():
            return [RootGroup(members, self._in_flight) for members in kinds.values()]
