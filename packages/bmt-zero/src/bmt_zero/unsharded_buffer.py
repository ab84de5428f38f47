"""``UnshardedBuffer``: the memory of a group's whole parameters while they are gathered.

[Note: one storage] The buffer is one storage for the life of the group; "freed" means resized to
zero bytes. Autograd saves views of weights. They do not keep the memory alive, and are valid again
after the next gather, because the storage is the same. A view must not be read while the buffer is
freed: see [Note: views of freed buffers] in :mod:`bmt_zero.recomputation`. Gathers write through a
second tensor with its own version counter, so that autograd does not take gathering the same values
again for a modification.

[Note: leases] Who needs the memory takes a lease and gives it back; the memory is freed with the
last lease. A lease is a reason and a number, so that taking or giving back twice does nothing:

- a *call* of a block, while its forward or its backward runs;
- *ahead*: a block that is expected to be called next;
- a *schedule*, between the calls of a step that use the same parameters;
- the *level*, when the parameters stay;
- a *call at rest*: at level 2, from the end of its forward to its backward, because autograd saved
  views of the memory.

Ranks may have different calls at rest: one rank may keep an output, and with it the graph, that
others have dropped. So their leases keep the memory, but must not influence whether ranks gather.
If there are no others, the next forward gathers into the memory again. The backward of a call at
rest runs on all ranks or on none, and uses what is there.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Literal

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.errors import CallError
from bmt_core.run.lanes import Lane, Mark
from bmt_core.torch_internals import storage_key
from bmt_zero.flat_parameters import FlatParameters

Reason = Literal["call", "ahead", "schedule", "level", "rest"]
Lease = tuple[Reason, int]
"""Why the memory is needed, and the number of the call or of the block that needs it: see
[Note: leases].
"""
STAYS: Lease = "level", 0
"""The lease of a group whose whole parameters stay."""


class UnshardedBuffer:
    """The memory of the whole parameters of ``flat``, filled by gathers in ``lane`` and freed when
    nobody has a lease of it. The buffer of a group that is not gathered is its shard.

    ``leases`` keep it gathered; ``at_rest``, those of calls at rest, only keep the memory.
    """

    def __init__(self, flat: FlatParameters, lane: Lane) -> None:
        # Set once, the purpose by the first gather.
        self._flat = flat
        self._lane = lane
        self._run = gathered_memory.run
        self._purpose = ""
        # Changed by each call.
        self.leases: set[Lease] = set()
        self.at_rest: set[Lease] = set()
        self._arrival: Mark | None = None  # of the gather that the computation has not waited for
        # After it the computation no longer reads what the next gather overwrites.
        self._read_until: Mark | None = None
        self.has_memory = False
        self._version = flat.version  # that of the last gather
        if not flat.is_gathered:
            self.tensor = self._writer = flat.shard
            self.storage = storage_key(self.tensor)
            return
        self.tensor = torch.empty(flat.total, dtype=flat.gathered_dtype, device=flat.device)
        self.tensor.untyped_storage().resize_(0)
        self._writer = self.tensor.data
        self.storage = storage_key(self.tensor)
        """Tells views of the buffer: see [Note: one storage]."""

    def is_gathered_for(self, lease: Lease) -> bool:
        """Whether the present values are there, or arriving, for who takes ``lease`` next."""
        if not self._flat.is_gathered:
            return True
        return (
            self.has_memory
            and self._version == self._flat.version
            and (bool(self.leases) or (lease[0] == "call" and ("rest", lease[1]) in self.at_rest))
        )

    def gather(self, name: str) -> None:
        """Start to fill the buffer from all ranks' shards; ``name`` shows in a profiler's trace.
        Collective.
        """
        if not self.has_memory:
            gathered_memory.change(self._flat.full_bytes, self._run)
            with self._lane.memory():
                self.tensor.untyped_storage().resize_(self._flat.full_bytes)
            self.has_memory = True
        else:
            if self._arrival is not None:
                self._lane.after(self._arrival)
            self._lane.after(self._read_until or self._lane.here())
        if not self._purpose:
            self._purpose = f"for {self._flat.labels}"
        with annotate(self._purpose, label=f"gather {name}"):
            secondary, refreshed = self._flat.secondary, None
            if secondary is not None and secondary.is_outdated(self._flat.version):
                # The first time it takes memory, which belongs to the lane.
                refreshed = self._lane.run(self._flat.refresh_secondary)
            gather = partial(self._flat.gather, self._writer)
            if refreshed is None:
                self._arrival = self._lane.run(gather)
            else:
                self._arrival = self._lane.run_after(refreshed, gather)
        self._version = self._flat.version

    def wait(self) -> None:
        """Make the computation wait for the gather under way, if there is one."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    def take(self, lease: Lease) -> None:
        """Keep the memory until :meth:`give_back`."""
        (self.at_rest if lease[0] == "rest" else self.leases).add(lease)
        if lease[0] == "call":
            self._read_until = None

    def give_back(self, lease: Lease) -> None:
        """End ``lease``, if it was taken; the last one frees the memory."""
        (self.at_rest if lease[0] == "rest" else self.leases).discard(lease)
        if not self.has_memory:
            return
        if self.leases or self.at_rest:
            if lease[0] == "call":
                self._read_until = self._lane.here()
            return
        if self._arrival is not None:
            with suppress(CallError):  # nobody reads what was gathered, and other calls report it
                self._lane.after(self._arrival)
            self._arrival = None
        gathered_memory.change(-self._flat.full_bytes, self._run)
        self._lane.follow()  # [Note: buffer lifetime] in bmt_core.run.lanes
        self.tensor.untyped_storage().resize_(0)
        self.has_memory = False

    def discard(self) -> None:
        """Stop using the buffer for good. Views that still live keep its memory."""
        if self.has_memory:
            gathered_memory.change(-self._flat.full_bytes, self._run)
            with suppress(CallError):  # as above
                self.wait()
            self._lane.follow()  # queued readers come first
            self.has_memory = False


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
