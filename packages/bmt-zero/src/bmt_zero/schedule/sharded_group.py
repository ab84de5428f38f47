"""``ShardedGroup``: one group of parameters, its buffer and its ledger of gradients; the owner of these parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from bmt_core.params.owner import OwnerReference, ReductionWatcher
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.gradients.ledger import GradientLedger, ReductionsInFlight
from bmt_zero.sharding.data_version import DataVersion
from bmt_zero.sharding.parameter_group import ParameterGroup
from bmt_zero.sharding.unsharded_buffer import UnshardedBuffer


class ShardedGroup:
    """Parameters that are gathered by one all-gather, and whose gradients are reduced by one reduce-scatter.

    ``group`` has their layout and shard, ``data`` tells whether their values changed, ``buffer`` holds them whole, ``ledger``
    has their gradients. ``level`` is the ZeRO level. Implements :class:`bmt_core.params.owner.ParameterOwner`.
    """

    def __init__(
        self,
        group: ParameterGroup,
        *,
        level: int,
        reduce_dtype: ReduceDtype,
        name: str,
        in_flight: ReductionsInFlight,
    ) -> None:
        lanes = current().lanes
        self.level = level
        self.name = name
        self.group = group
        self.data = DataVersion(group, lanes.gather)
        self.buffer = UnshardedBuffer(group, lanes.gather)
        self.ledger = GradientLedger(
            group, name=name, reduce_dtype=reduce_dtype, lane=lanes.reduce, in_flight=in_flight
        )
        self._leaves: list[torch.Tensor] = []
        reference: OwnerReference = weakref.ref(self)
        for parameter in group.parameters:
            parameter.owner_reference = reference

    def note_update(self, done: Mark | None = None, reads: object = None) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.data.note_update(done, reads)

    def wait_for_updates(self) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.data.updates.wait()

    def note_replaced_memory(self) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.data.is_memory_replaced = True

    def reduce_held_back(self) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.ledger.reduce_held_back()

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.ledger.watcher = watcher

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        return None

    def bytes_to_gather(self, own_holds: int) -> int:
        """Return how many bytes a gather would allocate: 0 if there are more holds than the caller's ``own_holds``."""
        is_there = self.buffer.holders > own_holds or (self.level < 2 and self.buffer.is_available)
        return 0 if is_there or self.group.is_replicated else self.group.full_bytes

    def look_for_changes(self) -> None:
        """Make the next :meth:`start_gather` gather again if values have changed since the last look."""
        if self.data.look():
            self.buffer.mark_outdated()

    def start_gather(self) -> None:
        """Start to gather the whole parameters, unless they are available. Collective."""
        if not self.buffer.is_available:
            self.data.updates.hold_up_lane()
            self.buffer.gather(self.name)

    def wait(self) -> None:
        """Make the computation wait until the whole parameters are gathered."""
        if self.group.is_replicated:
            self.data.updates.wait()
            self.data.updates.clear()
        self.buffer.wait()
        self.data.updates.forget_awaited()

    def release(self) -> None:
        """Undo one hold of the buffer; the last one frees it at levels 2 and 3."""
        self.buffer.release()
        self.free_unless_held()

    def release_at_rest(self) -> None:
        """Undo the hold of a call at rest; the last one frees the buffer at levels 2 and 3."""
        self.buffer.release_at_rest()
        self.free_unless_held()

    def free_unless_held(self) -> None:
        """Free the buffer at levels 2 and 3 when nobody holds it."""
        if self.level >= 2:
            self.buffer.free_unless_held()

    def views(self) -> list[torch.Tensor]:
        """Return the whole parameters in their shapes: new views of the buffer at each call."""
        return self.group.views_of(self.buffer.tensor)

    def leaves(self, trains: Sequence[bool]) -> list[torch.Tensor]:
        """Return the whole parameters as leaves of the autograd graph; ``trains`` says which require gradients.

        They are made once, and again when ``trains`` changes.
        """
        if [leaf.requires_grad for leaf in self._leaves] != trains:
            self._leaves = [
                view.detach().requires_grad_(train) for view, train in zip(self.views(), trains, strict=True)
            ]
        return self._leaves

    def end_gradients(
        self,
        full: torch.Tensor,
        wanted: Sequence[bool],
        *,
        is_taking: bool,
        reduces: bool = True,
        present: Callable[[torch.Tensor], Sequence[bool]] | None = None,
    ) -> Sequence[torch.Tensor | None]:
        """Reduce ``full``, the flat whole gradients of one backward, or hold them back. Collective if they are reduced.

        Return the gradients that autograd must use itself: for the user's hooks, or all if they do not go to ``.grad`` (not
        ``is_taking``). ``present`` tells of the reduced sum which of the ``wanted`` gradients any rank has.
        """
        ledger, is_hooked = self.ledger, self.group.is_hooked
        if is_taking and not is_hooked and present is None:
            if reduces or ledger.sum.is_taking:
                self.reduce(full, wanted)
            else:
                ledger.hold_back(full, wanted)
            return [None] * len(wanted)
        self._expect_update()
        reduced = ledger.reduce_now(full, completes=is_taking)
        if present is not None:
            wanted = [want and there for want, there in zip(wanted, present(reduced), strict=True)]
        if not is_taking:
            return ledger.sum.rounded(reduced, wanted)
        if is_hooked:
            return ledger.sum.seen_by_hooks(reduced, wanted)
        ledger.sum.take_now(reduced, wanted)
        return [None] * len(wanted)

    def reduce(self, full: torch.Tensor, wanted: Sequence[bool]) -> None:
        """Start to reduce ``full``, flat whole gradients. Collective."""
        self._expect_update()
        self.ledger.reduce(full, wanted)

    def _expect_update(self) -> None:
        # An update usually follows a reduction. Every rank knows of the reduction, so all ranks gather again.
        if self.level == 1:
            self.buffer.mark_outdated()
