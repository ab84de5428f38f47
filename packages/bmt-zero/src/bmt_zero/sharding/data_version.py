"""``DataVersion``: tells whether the values of a group's parameters have changed since they were last gathered."""

from __future__ import annotations

from bmt_core.run.lanes import Lane, Mark
from bmt_zero.sharding.parameter_group import ParameterGroup
from bmt_zero.sharding.pending_updates import PendingUpdates


class DataVersion:
    """Counts the changes of a group's values, and knows the updates that a reader has to wait for.

    Version counters of tensors alone would not do: on a rank whose part of a block is empty no counter moves when an optimizer
    passes over empty tensors, and ranks would disagree about gathering again. That an optimizer stepped
    (:meth:`note_update`) is the same on every rank.
    """

    def __init__(self, group: ParameterGroup, lane: Lane) -> None:
        self.number = 0
        self.is_memory_replaced = False
        self.updates = PendingUpdates(lane)
        self.updates.add()
        self._group = group
        self._is_update_noted = False
        self._seen = self._noted = (
            group.versions
        )  # of the parameters: at the last look, and when an update was last noted

    def note_update(self, done: Mark | None, reads: object) -> None:
        """See :meth:`bmt_core.params.owner.ParameterOwner.note_update`."""
        versions = self._group.versions
        if not self._is_update_noted or versions != self._noted:
            self._is_update_noted, self._noted = True, versions
            self.updates.add(done)
        if reads is not None:
            self.updates.keep_alive(reads)

    def look(self) -> bool:
        """Whether anything was written since the last look; :attr:`number` counts how often it was."""
        versions = self._group.versions
        if not self._is_update_noted and versions == self._seen:
            return False
        if versions != self._noted:  # somebody wrote without a word
            self.updates.add()
        self._seen = self._noted = versions
        self._is_update_noted = False
        self.number += 1
        return True
