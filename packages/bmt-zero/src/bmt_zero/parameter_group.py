"""``ParameterGroup``: parameters that are gathered by one all-gather, and whose gradients are
reduced by one reduce-scatter; and ``UnshardedBuffer``: the memory of the whole parameters while
they are gathered.

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

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.errors import CallError
from bmt_core.run.lanes import Lane, Mark
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_core.torch_internals import has_gradient_hooks, storage_key
from bmt_params.owner import OwnerReference, ReductionWatcher
from bmt_zero.flat_parameters import FlatParameters
from bmt_zero.gradient_ledger import GradientLedger, ReductionsInFlight

Reason = Literal["call", "ahead", "schedule", "level", "rest"]
Lease = tuple[Reason, int]
"""Why the memory is needed, and the number of the call or of the block that needs it: see
[Note: leases].
"""
STAYS: Lease = "level", 0
"""The lease of a group whose whole parameters stay."""


class ParameterGroup:
    """Parameters that are gathered by one all-gather, and whose gradients are reduced by
    one reduce-scatter.

    ``flat`` has their layout and shard, ``data`` tells whether their values changed, ``buffer``
    holds them whole, ``ledger`` has their gradients. ``level`` is the ZeRO level. Implements
    :class:`bmt_params.owner.ParameterOwner`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        level: int,
        reduce_dtype: ReduceDtype,
        name: str,
        in_flight: ReductionsInFlight,
    ) -> None:
        lanes = current().lanes
        self.name = name
        self.flat = flat
        self.parameters = flat.parameters
        self.is_gathered = flat.is_gathered
        self.data = DataVersion(flat, lanes.gather)
        self.buffer = UnshardedBuffer(flat, lanes.gather)
        self.set_level(level)
        self.expects_update = True
        """Whether an update may follow the next reduction: not inside of ``no_sync``."""
        self.ledger = GradientLedger(
            flat, name=name, reduce_dtype=reduce_dtype, lane=lanes.reduce, in_flight=in_flight
        )
        self._leaves: list[torch.Tensor] = []
        # Weakly: a parameter outlives its group when it moves to another.
        reference: OwnerReference = weakref.ref(self)
        for parameter in flat.parameters:
            parameter.owner_reference = reference

    def note_update(self, done: Mark | None = None, reads: object = None) -> None:
        self.data.note_update(done, reads)

    def wait_for_updates(self, *, despite_errors: bool = False) -> None:
        self.data.updates.wait(despite_errors=despite_errors)

    def note_replaced_memory(self) -> None:
        self.data.is_memory_replaced = True

    def reduce_held_back(self) -> None:
        self.ledger.reduce_held_back()

    def expect_gradient(self) -> None:
        self.ledger.expect_gradient()

    def gradient_is_set(self) -> None:
        self.ledger.gradient_is_set()

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        self.ledger.watcher = watcher

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        # A Block puts whole parameters into its modules. What reads one elsewhere gathers it alone.
        return None

    def bytes_to_gather(self, own: Lease) -> int:
        """Return how many bytes a gather would allocate: 0 if there are other leases than the
        caller's ``own``.
        """
        buffer = self.buffer
        if not self.is_gathered or not buffer.leases <= {own, STAYS}:
            return 0
        stays = STAYS in buffer.leases and buffer.is_gathered_for(own)
        return 0 if stays else self.flat.full_bytes

    def look_for_changes(self) -> None:
        """Make the next :meth:`start_gather` gather again if values have changed since the
        last look.
        """
        if self.data.has_changed():
            self.flat.version += 1

    def start_gather(self, lease: Lease) -> None:
        """Start to gather the whole parameters, unless they are there, and take ``lease``.
        Collective.
        """
        if not self.buffer.is_gathered_for(lease):
            # The lane waits for the optimizer's stream, the computation need not.
            self.data.updates.hold_up_lane()
            self.buffer.gather(self.name)
        self.buffer.take(lease)

    def wait(self) -> None:
        """Make the computation wait until the whole parameters are gathered."""
        if not self.is_gathered:  # no gather has waited for the updates: the shard itself is read
            self.data.updates.wait()
            self.data.updates.clear()
        self.buffer.wait()
        self.data.updates.forget_awaited()

    def set_level(self, level: int) -> None:
        """Change the level between steps, but not from or to 0."""
        self.level = level
        if level < 2:
            self.buffer.take(STAYS)
        else:
            self.buffer.give_back(STAYS)

    def views(self) -> list[torch.Tensor]:
        """Return the whole parameters in their shapes: new views of the buffer at each call."""
        return self.flat.whole_of(self.buffer.tensor)

    def leaves(self, trains: Sequence[bool]) -> list[torch.Tensor]:
        """Return the whole parameters as leaves of the autograd graph; ``trains`` says which
        require gradients.

        They are made once, and again when ``trains`` changes.
        """
        # They stay valid from pass to pass: see [Note: one storage].
        if [leaf.requires_grad for leaf in self._leaves] != trains:
            self._leaves = [
                view.detach().requires_grad_(train)
                for view, train in zip(self.views(), trains, strict=True)
            ]
        return self._leaves

    def end_gradients(
        self,
        full: torch.Tensor,
        needed: Sequence[bool],
        *,
        into_grad: bool,
        reduces: bool = True,
        present: Callable[[torch.Tensor], Sequence[bool]] | None = None,
    ) -> Sequence[torch.Tensor | None]:
        """Reduce ``full``, the flat whole gradients of one backward, or hold them back. Collective
        if they are reduced.

        Return the gradients that autograd must use itself: for the user's hooks, or all if they do
        not go to ``.grad`` (not ``into_grad``). ``present`` tells of the reduced sum which of the
        ``needed`` gradients any rank has.
        """
        # Whether the user watches gradients of these parameters, so that each must reach autograd.
        ledger, is_hooked = self.ledger, has_gradient_hooks(self.parameters)
        if into_grad and not is_hooked and present is None:
            # A pass that reduces the gradients of one call completes .grad, so it holds back none
            # of another call.
            if reduces or ledger.sum.is_adding:
                self.reduce(full, needed)
            else:
                ledger.hold_back(full, needed)
            return [None] * len(needed)
        # Hooks and autograd.grad() need the values now, so nothing overlaps.
        self._expect_update()
        reduced = ledger.reduce_now(full, completes=into_grad)
        if present is not None:
            needed = [need and there for need, there in zip(needed, present(reduced), strict=True)]
        if not into_grad:
            return ledger.sum.rounded(reduced, needed)
        if is_hooked:
            return ledger.sum.seen_by_hooks(reduced, needed)
        ledger.sum.add_now(reduced, needed)
        return [None] * len(needed)

    def reduce(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Start to reduce ``full``, flat whole gradients. Collective."""
        self._expect_update()
        self.ledger.reduce(full, needed)

    def _expect_update(self) -> None:
        # An update usually follows a reduction. Every rank knows of the reduction, so all ranks
        # gather again.
        if self.level == 1 or (self.flat.gathers_copies and self.expects_update):
            self.flat.version += 1


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
        self._writer = self.tensor.data  # a version counter of its own: see [Note: one storage]
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
            # Allocated for the lane, which writes it before the computation reads it.
            with self._lane.memory():
                self.tensor.untyped_storage().resize_(self._flat.full_bytes)
            self.has_memory = True
        else:  # older values are there, which somebody may still read
            if self._arrival is not None:
                # On the CPU a lane has no order: the gather before may still be under way.
                self._lane.after(self._arrival)
            # Without a mark a call may read them at present.
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
            # The call reads from here on; where it ends is not known yet.
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


class DataVersion:
    """Counts the changes of a group's values, and keeps the updates that a reader has to wait for.

    torch's version counters are not enough: an optimizer does not change the counters of empty
    tensors, so a rank whose part of the block is empty would not gather again when the others do.
    Every rank knows of an optimizer's step (:meth:`note_update`).
    """

    def __init__(self, flat: FlatParameters, lane: Lane) -> None:
        self.number = 0
        self.is_memory_replaced = False
        self.updates = PendingUpdates(lane)
        # The computation writes the first values, too, and the lane must wait for these.
        self.updates.add()
        self._parameters = flat.parameters
        self._is_update_noted = False
        # Versions of the parameters at the last look, and when an update was last noted.
        self._seen = self._noted = self._versions()

    def note_update(self, done: Mark | None, reads: object) -> None:
        versions = self._versions()
        # The hook after steps notes again what an optimizer has noted with a mark of its own.
        if not self._is_update_noted or versions != self._noted:
            self._is_update_noted, self._noted = True, versions
            self.updates.add(done)
        if reads is not None:
            self.updates.keep_alive(reads)

    def has_changed(self) -> bool:
        """Whether values have changed since the last look; if so, :attr:`number` grows by one."""
        versions = self._versions()
        if not self._is_update_noted and versions == self._seen:
            return False
        if versions != self._noted:  # written without note_update(), by an operation of the user's
            self.updates.add()
        self._seen = self._noted = versions
        self._is_update_noted = False
        self.number += 1
        return True

    def _versions(self) -> list[int]:
        """Return torch's version counter of each parameter's part, which counts
        in-place modifications.
        """
        return [parameter._version for parameter in self._parameters]


MOST = 4
"""How many updates are remembered. An optimizer waits for its last update before the next, so there
is one per optimizer.
"""


@dataclass
class _Update:
    done: Mark
    reads: object = None
    is_lane_told: bool = False  # to wait for it


class PendingUpdates:
    """Optimizer updates of a shard that nobody has waited for yet: the mark of each one's end, and
    the objects that it reads.

    Parts of one shard may belong to several optimizers, each with a stream of its own, so the
    update noted last need not finish last. ``lane`` gathers the updated shard.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._updates: list[_Update] = []

    def add(self, done: Mark | None = None) -> None:
        """Remember an update that ends at ``done``; None: at the current end of the
        computation's stream.
        """
        waiting = [update for update in self._updates if not update.is_lane_told]
        if len(waiting) >= MOST:  # the shard is updated and never gathered
            self.wait()
            self._updates = [update for update in self._updates if update.is_lane_told]
            # One mark for all that the computation has waited for.
            self._updates.append(_Update(self._lane.here()))
        self._updates.append(_Update(self._lane.here() if done is None else done))

    def keep_alive(self, reads: object) -> None:
        """Keep ``reads``, which the latest update reads, alive until somebody has waited for
        this update.
        """
        if self._updates:
            self._updates[-1].reads = reads

    def wait(self, *, despite_errors: bool = False) -> None:
        """Make the computation wait for all updates, also for those that the lane waits for: what
        it gathered ahead may never be used. Raise the error of one that failed, unless
        ``despite_errors``.
        """
        for update in self._updates:
            wait = update.done.wait
            if despite_errors:  # which only marks of the host's updates may raise
                wait = getattr(update.done, "wait_despite_error", wait)
            wait()

    def hold_up_lane(self) -> None:
        """Make the lane wait for all updates that it does not wait for yet."""
        for update in self._updates:
            if not update.is_lane_told:
                self._lane.after(update.done)
                update.is_lane_told = True

    def forget_awaited(self) -> None:
        """Forget updates that the lane waits for. Called once the computation has waited for
        the lane.
        """
        if self._updates:
            self._updates = [update for update in self._updates if not update.is_lane_told]

    def clear(self) -> None:
        """Forget all updates: the computation has waited for them."""
        self._updates.clear()
