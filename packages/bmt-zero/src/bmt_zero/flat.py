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

import torch

from bmt_core.comm import Group
from bmt_core.gradient import GradientSum, GradientWitness
from bmt_core.parameter import DistributedParameter, make_distributed
from bmt_core.shard import Shard, summation_dtype
from bmt_zero.layout import FlatLayout, flat_layout
from bmt_zero.memory import gathered_memory


class FlatShard:
    """Parameters of one dtype that are sharded over one group, as slices of one flat tensor.

    Making it is collective if a parameter was sharded in another way before. The parameters become
    :class:`DistributedParameter` and keep their identity.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, level: int, group: Group, device: torch.device
    ) -> None:
        self.group = group
        self.level = level
        self.dtype = parameters[0].dtype
        self.device = device
        # Level 0, and a group of one, own everything: the shard is the full tensor.
        self.is_whole = level == 0 or group.size == 1
        shapes = [_full_shape(parameter) for parameter in parameters]
        numels = [shape.numel() for shape in shapes]
        self.layout: FlatLayout = flat_layout(numels, self.dtype.itemsize, 1 if self.is_whole else group.size)
        rank = None if self.is_whole else group.rank
        pieces, indices = self.layout.pieces(rank)
        self.shard = torch.zeros(sum(pieces), dtype=self.dtype, device=device)
        parts = torch.split(self.shard, pieces)
        with torch.no_grad():
            self.parameters = [
                self._adopt(parameter, number, shapes[number], parts[index])
                for number, (parameter, index) in enumerate(zip(parameters, indices, strict=True))
            ]
        self.sum = GradientSum(self.parameters, pieces, indices)
        self.full, self._writer = self._make_full()
        pieces, self._indices = self.layout.pieces()
        self._like = [torch.empty(length, device="meta") for length in pieces]
        for index, shape in zip(self._indices, shapes, strict=True):
            self._like[index] = torch.empty(shape, device="meta")
        self._gaps = sorted(set(range(len(pieces))) - set(self._indices))
        self._holders = 0
        self._resident = self.is_whole
        self._is_current = False
        self._versions = self._current_versions()
        self._stepped = False
        self._unreduced: torch.Tensor | None = None
        self._witness: GradientWitness | None = None
        self.generation = 0
        self.stale = False

    def data_changed(self) -> None:
        """An optimizer stepped parameters of this shard (:class:`bmt_core.parameter.Owner`)."""
        self._stepped = True

    def data_replaced(self) -> None:
        """A parameter was given other memory: it must be laid out again before the next use (:class:`bmt_core.parameter.Owner`)."""
        self.stale = True

    def acquire(self, *, observe: bool = True) -> None:
        """Have the full parameters in memory until :meth:`release`. Collective when they must be gathered.

        ``observe`` False skips looking whether the optimizer changed the shards since the last look.
        """
        if observe:
            self.observe()
        if not self.is_whole and not (self._resident and self._is_current):
            self._gather()
        self._holders += 1

    def observe(self) -> None:
        """Look whether the shards were changed since the last look; :attr:`generation` counts how often they were."""
        versions = self._current_versions()
        if self._stepped or versions != self._versions:
            self._versions = versions
            self._stepped = False
            self._is_current = False
            self.generation += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one frees the buffer at levels 2 and 3."""
        self._holders -= 1
        self.free_unless_held()

    def free_unless_held(self) -> None:
        """Free the full buffer at levels 2 and 3 when nobody holds it."""
        if self._holders == 0 and self._resident and not self.is_whole and self.level >= 2:
            gathered_memory.change(-self._full_bytes)
            self.full.untyped_storage().resize_(0)
            self._resident = False

    def discard(self) -> None:
        """Give the full buffer back for good; this object is not used again."""
        if self._resident and not self.is_whole:
            gathered_memory.change(-self._full_bytes)
            self._resident = False

    def views(self) -> list[torch.Tensor]:
        """Return the full parameters, in their shapes: views of the full buffer, fresh objects at each call."""
        return self._pieces_of(self.full)

    def is_full_storage(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the full buffer, which may be freed."""
        return not self.is_whole and self.is_view(tensor)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the full parameters."""
        return bool(tensor.untyped_storage()._cdata == self.full.untyped_storage()._cdata)

    def forget_cleared_gradients(self) -> None:
        """Drop sums whose gradients the user cleared: see the note on gradient accumulation in :mod:`bmt_core.gradient`."""
        self.sum.forget_if_cleared()
        if self._witness is not None and not self._witness.unchanged():
            self._unreduced = self._witness = None

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return this rank's slice of the sum over ranks of ``grads`` (full gradients, None for zero). Collective.

        What :meth:`hold` kept is part of it. Half types are summed in float32, which is then the dtype of the result.
        """
        self.forget_cleared_gradients()
        if self.level == 1:
            # What follows a reduction is an update, by whomever; that it was reduced is known to every rank alike.
            self._is_current = False
        wide = summation_dtype(self.dtype)
        if self._unreduced is not None:
            buffer, self._unreduced, self._witness = self._unreduced, None, None
            self._add(buffer, grads)
        else:
            buffer = torch.empty(self.layout.total, dtype=wide if self.is_whole else self.dtype, device=self.device)
            self._fill(buffer, grads)
        if self.is_whole:
            self.group.all_reduce(buffer).wait()
            return buffer
        output = torch.empty(self.layout.slice_length, dtype=wide, device=self.device)
        self.group.reduce_scatter(output, buffer).wait()
        return output

    def hold(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep ``grads`` for a later :meth:`reduce`, summed locally in float32.

        ``.grad`` becomes zero where there is none yet: when ``zero_grad`` touches it, what is kept here goes too.
        """
        self.forget_cleared_gradients()
        if self._unreduced is None:
            self._unreduced = torch.zeros(self.layout.total, dtype=summation_dtype(self.dtype), device=self.device)
        self._add(self._unreduced, grads)
        zeros = self.sum.views(torch.zeros_like(self.shard))
        for parameter, zero, grad in zip(self.parameters, zeros, grads, strict=True):
            if parameter.grad is None and (grad is not None or parameter.requires_grad):
                parameter.grad = zero
        self._witness = GradientWitness(self.parameters, [parameter.grad for parameter in self.parameters])

    def complete_gradients(self) -> None:
        """Reduce what :meth:`hold` kept and no later backward took along (:class:`bmt_core.parameter.Owner`). Collective."""
        self.forget_cleared_gradients()
        if self._unreduced is None:
            return
        needed = [parameter.requires_grad for parameter in self.parameters]
        reduced = self.reduce([None] * len(self.parameters))
        for parameter, grad in zip(self.parameters, self.sum.add(reduced, needed), strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def is_hooked(self) -> bool:
        """Whether the user watches gradients of these parameters, so that each must reach autograd."""
        return any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self.parameters)

    def _adopt(
        self, parameter: torch.nn.Parameter, number: int, shape: torch.Size, place: torch.Tensor
    ) -> DistributedParameter:
        whole = ((0, shape.numel()),) * self.group.size
        ranges = whole if self.is_whole else self.layout.ranges(number)
        shard = Shard(shape, ranges, self.group, replicated=self.is_whole)
        place.copy_(_part(parameter, shard))
        adopted = make_distributed(parameter, shard, place)
        adopted._in_block = True
        adopted._owner = weakref.ref(self)
        return adopted

    def _make_full(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_whole:
            return self.shard, self.shard
        full = torch.empty(self.layout.total, dtype=self.dtype, device=self.device)
        full.untyped_storage().resize_(0)
        return full, full.data

    @property
    def _full_bytes(self) -> int:
        return self.layout.total * self.dtype.itemsize

    def _gather(self) -> None:
        if not self._resident:
            self.full.untyped_storage().resize_(self._full_bytes)
            gathered_memory.change(self._full_bytes)
            self._resident = True
        self.group.all_gather(self._writer, self.shard).wait()
        self._is_current = True

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _pieces_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch._C._nn.unflatten_dense_tensors(flat, self._like)
        return [pieces[index] for index in self._indices]

    def _fill(self, buffer: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> None:
        pieces = torch._C._nn.unflatten_dense_tensors(buffer, self._like)
        targets = [pieces[index] for index in self._indices]
        present = [(target, grad) for target, grad in zip(targets, grads, strict=True) if grad is not None]
        empty = [pieces[index] for index in self._gaps]
        empty += [target for target, grad in zip(targets, grads, strict=True) if grad is None]
        if present:
            torch._foreach_copy_([target for target, _ in present], [_dense(grad) for _, grad in present])
        if empty:
            torch._foreach_zero_(empty)

    def _add(self, buffer: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> None:
        pairs = [(t, _dense(g)) for t, g in zip(self._pieces_of(buffer), grads, strict=True) if g is not None]
        if pairs:
            torch._foreach_add_([target for target, _ in pairs], [grad for _, grad in pairs])


def _full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    return parameter.full_shape if isinstance(parameter, DistributedParameter) else parameter.shape


def _part(parameter: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
    if not isinstance(parameter, DistributedParameter):
        return shard.part(parameter.detach())
    # The same ranges on one rank are the same on all: every rank takes the same branch.
    if parameter._shard.ranges == shard.ranges and parameter._shard.group.ranks == shard.group.ranks:
        return parameter.detach()
    return shard.part(parameter.gather_like(parameter.detach()))


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad
