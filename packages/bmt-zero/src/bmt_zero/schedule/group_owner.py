"""``GroupOwner``: the owner of a group's parameters, with what tells changes, gathers and reduces them."""

from __future__ import annotations

import weakref

import torch

from bmt_core.params.owner import OwnerReference, ReductionWatcher
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.gradients.reducer import GradientReducer
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.sharding.data_version import DataVersion
from bmt_zero.sharding.local_shard import LocalShard
from bmt_zero.sharding.unsharded_buffer import UnshardedBuffer


class GroupOwner:
    """What is gathered by one all-gather and reduced by one reduce-scatter.

    ``data`` says whether the values of ``shard`` changed, ``buffer`` holds them whole, ``reducer`` sums their gradients.
    Implements :class:`bmt_core.params.owner.ParameterOwner`.
    """

    def __init__(
        self, shard: LocalShard, *, reduce_dtype: ReduceDtype, name: str, in_flight: ReductionsInFlight
    ) -> None:
        lanes = current().lanes
        self.name = name
        self.data = DataVersion(shard, lanes.gather)
        self.buffer = UnshardedBuffer(shard, lanes.gather)
        self.reducer = GradientReducer(
            shard, name=name, reduce_dtype=reduce_dtype, lane=lanes.reduce, in_flight=in_flight
        )
        self._in_flight = in_flight
        reference: OwnerReference = weakref.ref(self)
        for parameter in shard.parameters:
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
        self.reducer.reduce_held_back()

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.reducer.watcher = watcher

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        return None

    def look_for_changes(self) -> None:
        """Have the next :meth:`start_gather` gather again if the values were changed since the last look."""
        if self.data.look():
            self.buffer.mark_outdated()

    def start_gather(self) -> None:
        """Have the whole parameters on their way, unless they are there. Collective."""
        if not self.buffer.is_available:
            self.data.updates.hold_up_lane()
            self.buffer.gather(self.name)
