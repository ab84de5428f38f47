"""``UnshardedBuffer``: the memory of a group's whole parameters while they are gathered.

[Note: one storage] The buffer is one storage for the life of the group; "freed" means resized to
zero bytes. Autograd saves views of weights. They do not keep the memory alive, and are valid again
after the next gather, because the storage is the same. A view must not be read while the buffer is
freed: see [Note: views of freed buffers] in :mod:`bmt_zero.recomputation`. Gathers write through a
second tensor with its own version counter, so that autograd does not take gathering the same values
again for a modification.

[Note: calls at rest] At level 2 a call keeps the memory from the end of its forward to its
backward, because autograd saved views of it. Such a call is "at rest". Ranks may have different
calls at rest: one rank may keep an output, and with it the graph, that others have dropped. So
calls at rest keep the memory, but must not influence whether ranks gather. A buffer that only they
keep is KEPT: the next forward gathers into it again. The backward of a call at rest runs on all
ranks or on none, and uses what is there.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum, auto
from functools import partial

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.errors import CallError
from bmt_core.run.lanes import Lane, Mark
from bmt_core.torch_internals import storage_key
from bmt_zero.flat_parameters import FlatParameters
from bmt_zero.peer_gathers import Gather


class BufferState(Enum):
    """The content of the buffer."""

    FREED = auto()
    """No memory."""
    OUTDATED = auto()
    """Memory with values from before an update."""
    IN_FLIGHT = auto()
    """A gather is under way, and the computation has not waited for it."""
    KEPT = auto()
    """The whole parameters, or a gather of them, held by calls at rest only: see
    [Note: calls at rest].
    """
    READY = auto()
    """The whole parameters."""


AVAILABLE = BufferState.IN_FLIGHT, BufferState.READY
"""The states in which the whole parameters are there or being gathered."""


class UnshardedBuffer:
    """The memory of the whole parameters of ``flat``, filled by gathers in ``lane`` and freed when
    nobody holds it.

    ``stays``: it is not freed, as at level 1. ``holders`` counts the holders, without calls at
    rest: see [Note: calls at rest]. The buffer of a group that is not gathered is its shard: always
    READY, never freed.
    """

    def __init__(self, flat: FlatParameters, lane: Lane, *, stays: bool) -> None:
        self._flat = flat
        self._lane = lane
        self.stays = stays
        self.holders = 0
        self._calls_at_rest = 0
        self._run = gathered_memory.run
        self._purpose = ""
        self._gather: Gather | None = None
        self._arrival: Mark | None = None
        # After it the computation no longer reads what the next gather overwrites.
        self._read_until: Mark | None = None
        if not flat.is_gathered:
            self.tensor = self._writer = flat.shard
            self.state = BufferState.READY
            self.storage = storage_key(self.tensor)
            return
        self.tensor = torch.empty(flat.total, dtype=flat.gathered_dtype, device=flat.device)
        self.tensor.untyped_storage().resize_(0)
        self._writer = self.tensor.data
        self.state = BufferState.FREED
        self.storage = storage_key(self.tensor)
        """Tells views of the buffer: see [Note: one storage]."""

    def gather(self, name: str) -> None:
        """Start to fill the buffer from all ranks' shards; ``name`` shows in a profiler's trace.
        Collective.
        """
        if self.state is BufferState.FREED:
            gathered_memory.change(self._flat.full_bytes, self._run)
            with self._lane.memory():
                self.tensor.untyped_storage().resize_(self._flat.full_bytes)
        elif self._read_until is not None:
            self._lane.after(self._read_until)
            self._read_until = None
        if not self._purpose:
            self._purpose = f"for {self._flat.labels}"
        with annotate(self._purpose, label=f"gather {name}"):
            secondary, refreshed = self._flat.secondary, None
            if secondary is not None and secondary.take_outdated():
                # The first time it takes memory, which belongs to the lane.
                refreshed = self._lane.run(self._flat.refresh_secondary)
            if self._gather is None:
                self._gather = self._flat.gather()
            gather = partial(self._gather, self._writer)
            if refreshed is None:
                self._arrival = self._lane.run(gather)
            else:
                self._arrival = self._lane.run_after(refreshed, gather)
        self.state = BufferState.IN_FLIGHT

    def wait(self) -> None:
        """Make the computation wait for the gather under way, if there is one."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
            self.state = BufferState.READY

    def mark_outdated(self) -> None:
        """Note that the shards were changed since the last gather."""
        if (self.state in AVAILABLE or self.state is BufferState.KEPT) and self._flat.is_gathered:
            if self._arrival is not None:
                self._lane.after(self._arrival)
                self._arrival = None
            self.state = BufferState.OUTDATED
            self._read_until = self._lane.here()

    def hold(self) -> None:
        """Keep the memory until :meth:`release`."""
        self.holders += 1

    def release(self) -> None:
        """Undo one :meth:`hold`; the last one frees the memory."""
        self.holders -= 1
        assert self.holders >= 0
        self.free_unless_held()

    def hold_at_rest(self) -> None:
        """Keep the memory for a call at rest until :meth:`release_at_rest`."""
        self._calls_at_rest += 1

    def release_at_rest(self) -> None:
        """Undo one :meth:`hold_at_rest`; the last one frees the memory."""
        self._calls_at_rest -= 1
        assert self._calls_at_rest >= 0
        self.free_unless_held()

    def take_kept(self) -> None:
        """Make a KEPT buffer available, for the backward of a call at rest."""
        if self.state is BufferState.KEPT:
            self.state = BufferState.READY if self._arrival is None else BufferState.IN_FLIGHT

    def free_unless_held(self) -> None:
        """Free the memory if nobody holds it and it does not stay."""
        if (
            self.holders
            or self.stays
            or self.state is BufferState.FREED
            or not self._flat.is_gathered
        ):
            return
        if self._calls_at_rest:
            if self.state in AVAILABLE:
                self.state = BufferState.KEPT
                self._read_until = self._lane.here()
            return
        if self._arrival is not None:
            with suppress(CallError):  # nobody reads what was gathered, and other calls report it
                self._lane.after(self._arrival)
            self._arrival = None
        gathered_memory.change(-self._flat.full_bytes, self._run)
        self._lane.follow()  # [Note: buffer lifetime] in bmt_core.run.lanes
        self.tensor.untyped_storage().resize_(0)
        self.state = BufferState.FREED

    def discard(self) -> None:
        """Stop using the buffer for good. Views that still live keep its memory."""
        if self.state is not BufferState.FREED and self._flat.is_gathered:
            gathered_memory.change(-self._flat.full_bytes, self._run)
            with suppress(CallError):  # as in free_unless_held()
                self.wait()
            self._lane.follow()  # queued readers come first
            self.state = BufferState.FREED


class GatheredMemory:
    """Bytes of the run's gathered parameter buffers in this process: now, and the highest
    since :meth:`reset_peak`.

    Runs are counted from 1. A run that failed may leave buffers that nobody frees, so those of
    earlier runs do not count.
    """

    def __init__(self) -> None:
        self.run = 0
        self.current = 0
        self.peak = 0

    def begin_run(self) -> None:
        """Count the buffers of a new run."""
        self.run += 1
        self.current = self.peak = 0

    def change(self, size: int, run: int) -> None:
        """Count ``size`` more (or, negative, fewer) bytes, of a buffer that was made in ``run``."""
        if run == self.run:
            self.current += size
            if self.current > self.peak:
                self.peak = self.current

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak = self.current


gathered_memory = GatheredMemory()
