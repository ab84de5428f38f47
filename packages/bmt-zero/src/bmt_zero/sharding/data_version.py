"""``DataVersion``: tells whether the values of a group's parameters have changed since they were last gathered."""

from __future__ import annotations

from bmt_core.run.lanes import Lane, Mark
from bmt_zero.sharding.parameter_group import ParameterGroup
from bmt_zero.sharding.pending_updates import PendingUpdates


class DataVersion:
    """Counts the changes of a group's values, and keeps the updates that a reader has to wait for.

    torch's version counters are not enough: an optimizer does not change the counters of empty tensors, so a rank whose part of the
    block is empty would not gather again when the others do. Every rank knows of an optimizer's step (:meth:`note_update`).
    """

    def __init__(self, group: ParameterGroup, lane: Lane) -> None:
        self.number = 0
        self.is_memory_replaced = False
        self.updates = PendingUpdates(lane)
        self.updates.add()
        self._group = group
        self._is_update_noted = False
        # Versions of the parameters at the last look, and when an update was last noted.
        self._seen = self._noted = group.versions

    def note_update(self, done: Mark | None, reads: object) -> None:
        """See :meth:`bmt_core.params.owner.ParameterOwner.note_update`."""
        versions = self._group.versions
        if not self._is_update_noted or versions != self._noted:
            self._is_update_noted, self._noted = True, versions
            self.updates.add(done)
        if reads is not None:
            self.updates.keep_alive(reads)

    def look(self) -> bool:
        """Whether values have changed since the last look; if so, :attr:`number` grows by one."""
        versions = self._group.versions
        if not self._is_update_noted and versions == self._seen:
            return False
        if versions != self._noted:  # written without note_update(), by an operation of the user's
            self.updates.add()
        self._seen = self._noted = versions
        self._is_update_noted = False
        self.number += 1
        return True
