"""``FlatShard``: parameters of one kind in one flat tensor, sharded over one group.

[Note: one storage] The full buffer is one storage for the life of the block; "freed" means resized to zero bytes.
Autograd saves views of weights: they neither pin the memory nor dangle, for when the buffer is gathered again it is
the same storage. A view that is read while the buffer is freed has no memory: see :mod:`bmt_zero.saved`. Gathers write
through a tensor with a version counter of its own: filling the buffer again with the same values is no modification that
autograd should complain about.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from bmt_core.comm import Group, Work
from bmt_core.params.gradient_sum import GradientSum, GradientWitness
from bmt_core.params.owner import ReductionWatcher
from bmt_core.params.parameter import DistributedParameter, make_distributed
from bmt_core.params.shard import Shard, summation_dtype
from bmt_core.params.uninitialized import has_values
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.layout import FlatLayout, flat_layout
from bmt_zero.memory import gathered_memory
from bmt_zero.writes import Writes


class FlatShard:
    """Parameters of one dtype that are sharded over one group, as slices of one flat tensor.

    Making it is collective if a parameter was sharded in another way before, and when it is the first one over its
    group. The parameters become :class:`DistributedParameter` and keep their identity.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        level: int,
        group: Group,
        device: torch.device,
        reduce_dtype: ReduceDtype = "fp32-sum",
        name: str = "block",
    ) -> None:
        self.group = group
        self.name = name
        self.level = level
        self.dtype = parameters[0].dtype
        self.device = device
        self.reduce_dtype = reduce_dtype
        self.lanes = current().lanes
        self.reducing = self.lanes.reduce.group(group)
        # Level 0, and a group of one, own everything: the shard is the full tensor.
        self.is_whole = level == 0 or group.size == 1
        self.shapes = [_full_shape(parameter) for parameter in parameters]
        numels = [shape.numel() for shape in self.shapes]
        self.layout: FlatLayout = flat_layout(numels, self.dtype.itemsize, 1 if self.is_whole else group.size)
        rank = None if self.is_whole else group.rank
        pieces, indices = self.layout.pieces(rank)
        self.shard = torch.zeros(sum(pieces), dtype=self.dtype, device=device)
        parts = torch.split(self.shard, pieces)
        with torch.no_grad():
            self.parameters = [
                self._adopt(parameter, number, self.shapes[number], parts[index])
                for number, (parameter, index) in enumerate(zip(parameters, indices, strict=True))
            ]
        self.sum = GradientSum(self.parameters, pieces, indices)
        self.full, self._writer = self._make_full()
        pieces, self._indices = self.layout.pieces()
        self._like = [torch.empty(length, device="meta") for length in pieces]
        for index, shape in zip(self._indices, self.shapes, strict=True):
            self._like[index] = torch.empty(shape, device="meta")
        self._gaps = sorted(set(range(len(pieces))) - set(self._indices))
        self._holders = 0
        self._is_wanted = False
        self._resident = self.is_whole
        self._is_current = False
        self._arrival: Mark | None = None
        self._writes = Writes(self.lanes.gather)
        self._writes.add()
        self._watcher: ReductionWatcher | None = None
        self._versions = self._told = self._current_versions()
        self._stepped = False
        self._unreduced: torch.Tensor | None = None
        self._witness: GradientWitness | None = None
        self.generation = 0
        self.stale = False

    @property
    def full_bytes(self) -> int:
        """Size of the full buffer."""
        return self.layout.total * self.dtype.itemsize

    @property
    def held_back_bytes(self) -> int:
        """Size of what :meth:`hold_back` keeps between micro-batches, if any parameter trains."""
        trains = True in [parameter.requires_grad for parameter in self.parameters]
        return self.layout.total * summation_dtype(self.dtype).itemsize if trains else 0

    @property
    def is_available(self) -> bool:
        """Whether the full parameters are in memory, or on their way, as far as was last observed."""
        return self.is_whole or (self._resident and self._is_current)

    @property
    def is_held(self) -> bool:
        """Whether a use holds the full parameters."""
        return self._holders > 0

    def note_update(self, done: Mark | None = None, reads: object = None) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        versions = self._current_versions()
        if not self._stepped or versions != self._told:
            self._stepped, self._told = True, versions
            self._writes.add(done)
        if reads is not None:
            self._writes.keep(reads)

    def wait_for_updates(self) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self._writes.wait()

    def watch_reductions(self, watcher: ReductionWatcher | None) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self._watcher = watcher

    def note_replaced_memory(self) -> None:
        """See :class:`bmt_core.params.owner.ParameterOwner`."""
        self.stale = True

    def observe(self) -> None:
        """Look whether the shards were changed since the last look; :attr:`generation` counts how often they were."""
        versions = self._current_versions()
        if self._stepped or versions != self._versions:
            if versions != self._told:
                self._writes.add()
            self._versions = self._told = versions
            self._stepped = False
            self._is_current = False
            self.generation += 1

    def start_gather(self) -> None:
        """Have the full parameters on their way, unless they are there. Collective."""
        if self.is_available:
            return
        lane = self.lanes.gather
        self._writes.hold_up_lane()
        if not self._resident:
            with lane.memory():
                self.full.untyped_storage().resize_(self.full_bytes)
            gathered_memory.change(self.full_bytes)
            self._resident = True
        with named(f"gather {self.name}"):
            self._arrival = lane.run(lambda: self.group.all_gather(self._writer, self.shard))
        self._is_current = True

    def hold(self) -> None:
        """Keep the full parameters, which are on their way or there, until :meth:`release`."""
        self._holders += 1

    def arrive(self) -> None:
        """Let the computation wait for the full parameters."""
        if self.is_whole:
            self._writes.wait()
            self._writes.clear()
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        self._writes.forget()

    def release(self) -> None:
        """Undo one :meth:`hold`; the last one frees the buffer at levels 2 and 3."""
        self._holders -= 1
        self.free_unless_held()

    def want(self, wanted: bool) -> None:
        """Say whether the next use is near, so that nobody's letting go frees the buffer."""
        self._is_wanted = wanted
        self.free_unless_held()

    def free_unless_held(self) -> None:
        """Free the full buffer at levels 2 and 3 when nobody holds or wants it."""
        if self._holders or self._is_wanted or not self._resident or self.is_whole or self.level < 2:
            return
        lane = self.lanes.gather
        if self._arrival is not None:
            lane.after(self._arrival)
            self._arrival = None
        lane.after(lane.here())  # [Note: buffer lifetime] in bmt_core.run.lanes
        self.full.untyped_storage().resize_(0)
        gathered_memory.change(-self.full_bytes)
        self._resident = False

    def discard(self) -> None:
        """Give the full buffer back for good; this object is not used again."""
        if self._resident and not self.is_whole:
            gathered_memory.change(-self.full_bytes)
            self._resident = False
            if self._arrival is not None:
                self._arrival.wait()

    def views(self) -> list[torch.Tensor]:
        """Return the full parameters, in their shapes: views of the full buffer, fresh objects at each call."""
        return self.views_of(self.full)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a tensor laid out like the full buffer, in the parameters' shapes."""
        pieces = torch._C._nn.unflatten_dense_tensors(flat, self._like)
        return [pieces[index] for index in self._indices]

    def gaps_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a tensor laid out like the full buffer that belong to no parameter."""
        if not self._gaps:
            return []
        pieces = torch._C._nn.unflatten_dense_tensors(flat, self._like)
        return [pieces[index] for index in self._gaps]

    def is_full_storage(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the full buffer, which may be freed."""
        return not self.is_whole and self.is_view(tensor)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the full parameters."""
        return bool(tensor.untyped_storage()._cdata == self.full.untyped_storage()._cdata)

    def forget_cleared_gradients(self) -> None:
        """Drop sums whose gradients the user cleared: see :mod:`bmt_core.params.gradient_sum`."""
        self.sum.forget_if_cleared()
        if self._witness is not None and not self._witness.unchanged():
            self._unreduced = self._witness = None

    @property
    def buffer_dtype(self) -> torch.dtype:
        """In which dtype full gradients are collected, which is that of the wire."""
        if self.group.size == 1 or self.reduce_dtype == "param":
            return self.dtype
        # An all-reduce has no form that sends a half type and sums float32.
        return summation_dtype(self.dtype) if self.is_whole or self.reduce_dtype == "fp32" else self.dtype

    def reduce(self, full: torch.Tensor, needed: Sequence[bool]) -> tuple[torch.Tensor, Mark]:
        """Reduce ``full``, flat full gradients, and what :meth:`hold_back` kept, into the :attr:`sum`, in the lane. Collective.

        Returns the tensor that the lane reads, which the caller keeps until the mark, and the mark. It is another one than
        ``full`` when gradients were held back.
        """
        lane = self.lanes.reduce
        full = self._with_held_back(full)
        reduced = self._make_reduced(full, stays=self.sum.is_first and self._reduced_dtype(full) == self.dtype)
        then = self.sum.take(reduced, needed)
        lane.after(lane.here())
        with named(f"reduce {self.name}"):
            mark = lane.run(lambda: self._start_reduction(reduced, full), then)
        self.sum.ready_at(mark)
        if self._watcher is not None and self.sum.flat is not None:
            self._watcher(self.sum.flat, mark)
        return full, mark

    def reduce_now(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum over ranks of ``full``; half types may come back as float32. Collective."""
        lane = self.lanes.reduce
        full = self._with_held_back(full)
        reduced = self._make_reduced(full, stays=True)
        lane.after(lane.here())
        lane.run(lambda: self._start_reduction(reduced, full)).wait()
        return reduced

    def hold_back(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Keep ``full``, flat full gradients, for a later :meth:`reduce`, summed locally in float32.

        ``.grad`` becomes zero where there is none yet: when ``zero_grad`` touches it, what is kept here goes too.
        """
        self.forget_cleared_gradients()
        if self._unreduced is None:
            self._unreduced = full.to(summation_dtype(self.dtype))
        else:
            self._unreduced += full
        zeros = self.sum.views(torch.zeros_like(self.shard))
        for parameter, zero, wanted in zip(self.parameters, zeros, needed, strict=True):
            if parameter.grad is None and wanted:
                parameter.grad = zero
        self._witness = GradientWitness(self.parameters, [parameter.grad for parameter in self.parameters])

    def reduce_held_back(self) -> None:
        """Reduce what :meth:`hold_back` kept and no later backward took along. Collective."""
        self.forget_cleared_gradients()
        if self._unreduced is not None:
            nothing = torch.zeros(self.layout.total, dtype=self.buffer_dtype, device=self.device)
            _, mark = self.reduce(nothing, [parameter.requires_grad for parameter in self.parameters])
            mark.wait()
            self.sum.finish()

    def is_hooked(self) -> bool:
        """Whether the user watches gradients of these parameters, so that each must reach autograd."""
        watched = [bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in self.parameters]
        return True in watched

    def _with_held_back(self, full: torch.Tensor) -> torch.Tensor:
        self.forget_cleared_gradients()
        if self.level == 1:
            # What follows a reduction is an update, by whomever; that it was reduced is known to every rank alike.
            self._is_current = False
        held, self._unreduced, self._witness = self._unreduced, None, None
        if held is None:
            return full
        held += full
        return held

    def _make_reduced(self, full: torch.Tensor, *, stays: bool) -> torch.Tensor:
        """Return the tensor to reduce into: memory of the computation if it ``stays`` as a gradient, else of the lane."""
        if self.is_whole:
            return full
        with nullcontext() if stays else self.lanes.reduce.memory():
            return torch.empty(self.layout.slice_length, dtype=self._reduced_dtype(full), device=self.device)

    def _reduced_dtype(self, full: torch.Tensor) -> torch.dtype:
        return full.dtype if self.is_whole or self.reduce_dtype == "param" else summation_dtype(full.dtype)

    def _start_reduction(self, reduced: torch.Tensor, full: torch.Tensor) -> Work:
        return self.reducing.all_reduce(full) if self.is_whole else self.reducing.reduce_scatter(reduced, full)

    def _adopt(
        self, parameter: torch.nn.Parameter, number: int, shape: torch.Size, place: torch.Tensor
    ) -> DistributedParameter:
        whole = ((0, shape.numel()),) * self.group.size
        ranges = whole if self.is_whole else self.layout.ranges(number)
        shard = Shard(shape, ranges, self.group, replicated=self.is_whole)
        if has_values(parameter):
            place.copy_(_part(parameter, shard))
        adopted = make_distributed(parameter, shard, place)
        adopted._in_block = True
        adopted.owner_reference = weakref.ref(self)
        return adopted

    def _make_full(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_whole:
            return self.shard, self.shard
        full = torch.empty(self.layout.total, dtype=self.dtype, device=self.device)
        full.untyped_storage().resize_(0)
        return full, full.data

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]


def named(text: str) -> AbstractContextManager[object]:
    """Show ``text`` in a trace of torch's profiler as the name of what happens inside."""
    return torch.profiler.record_function(text) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


def _full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    return parameter.full_shape if isinstance(parameter, DistributedParameter) else parameter.shape


def _part(parameter: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
    if not isinstance(parameter, DistributedParameter):
        return shard.part(parameter.detach())
    # The same ranges on one rank are the same on all: every rank takes the same branch.
    if parameter._shard.ranges == shard.ranges and parameter._shard.group.ranks == shard.group.ranks:
        return parameter.detach()
    return shard.part(parameter.gather_like(parameter.detach()))
