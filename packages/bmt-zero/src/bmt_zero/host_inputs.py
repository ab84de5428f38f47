"""``HostInputs``: inputs of recomputed blocks that wait for backward in host memory.

When a block's forward begins, its large inputs are copied to the host in a lane, beside the
forward. When the next one begins, that copy has ended, and the device's memory is let go. When a
block's recomputation begins, its inputs come back, and the copy of those of the call before it
starts, beside this block's backward. One copy is under way at a time, and only its tensors are
kept: see [Note: buffer lifetime] in ``bmt_core/run/lanes.py``. The device's memory belongs to the
computation, and host memory is read and written in the lane alone, in order.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.errors import ConfigError
from bmt_core.run.lanes import Lane, Mark
from bmt_core.run.locked_memory import LockedMemory
from bmt_core.run.runtime import Runtime
from bmt_params.modules.outermost_call import is_gathered
from bmt_params.nested import map_tensors, tensors_in

SMALL = 1 << 20
"""Inputs of fewer bytes stay on the device."""


class HostPool:
    """Host memory for inputs. What is given back is kept for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self.total = 0
        """Bytes that inputs have or have had."""
        self._device = device
        self._idle: list[LockedMemory] = []

    @property
    def in_use(self) -> int:
        """Bytes that waiting inputs have."""
        return self.total - sum(map(_size, self._idle))

    def take(self, size: int, limit: int) -> LockedMemory | None:
        """Return at least ``size`` bytes; None if more than ``limit`` would then be in use.

        If nothing idle is large enough, it takes the place of something idle, so that inputs whose
        sizes differ from step to step have at most the memory of the largest.
        """
        fitting = [memory for memory in self._idle if _size(memory) >= size]
        found = min(fitting, key=_size, default=None)
        if self.in_use + (size if found is None else _size(found)) > limit:
            return None
        if found is not None:
            self._idle.remove(found)
            return found
        replaces = True
        while self._idle and (replaces or self.total + size > limit):
            largest = max(self._idle, key=_size)
            self._idle.remove(largest)
            self.total -= _size(largest)
            replaces = False
        memory = LockedMemory(size, self._device)
        self.total += size
        return memory

    def give_back(self, memory: LockedMemory) -> None:
        """Let later inputs have ``memory``."""
        self._idle.append(memory)


class HostCopy:
    """The values of ``tensor`` in ``memory``, which goes back to ``pool`` when nobody waits for
    them any more.
    """

    def __init__(self, tensor: torch.Tensor, memory: LockedMemory, pool: HostPool) -> None:
        numbers = memory.bytes[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        self.values = numbers.as_strided(tensor.shape, tensor.stride())
        self._of = weakref.ref(tensor), tensor._version
        self._memory, self._pool = memory, pool

    def __del__(self) -> None:
        self._pool.give_back(self._memory)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether these are the present values of ``tensor``, such as an encoder's output that all
        layers of a decoder get.
        """
        source, version = self._of
        return source() is tensor and tensor._version == version


class WaitingInputs:
    """The ``inputs`` of one call, with those in ``copies`` on the host."""

    def __init__(
        self,
        run: HostInputs,
        inputs: Any,
        copies: dict[int, HostCopy],
        before: WaitingInputs | None,
    ) -> None:
        self.copies = list(copies.values())
        self.inputs = map_tensors(lambda t: copies[id(t)].values if id(t) in copies else t, inputs)
        self.is_stale = False
        """Whether an input was modified before its copy had ended."""
        # Weakly: graphs are freed in any order.
        self.before = None if before is None else weakref.ref(before)
        self._run = run

    def on_device(self) -> Any:
        """Return the inputs as forward had them, for the recomputation that begins."""
        tensors = self._run.fetch(self)
        found = {id(c.values): t for c, t in zip(self.copies, tensors, strict=True)}
        return map_tensors(lambda t: found.get(id(t), t), self.inputs)


def _size(memory: LockedMemory) -> int:
    return memory.bytes.numel()


class _UnderWay(NamedTuple):
    """A copy to the host (with the versions of ``tensors`` before it), or from there."""

    inputs: weakref.ref[WaitingInputs]
    tensors: Sequence[torch.Tensor]
    versions: Sequence[int] | None
    end: Mark


class HostInputs:
    """Those of all calls of a run that wait for their backward."""

    def __init__(self, runtime: Runtime) -> None:
        self.pool = HostPool(runtime.device)
        self._device, self._lanes = runtime.device, runtime.lanes
        self._under_way: _UnderWay | None = None
        self._last: weakref.ref[WaitingInputs] | None = None
        self._copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()

    @functools.cached_property
    def _lane(self) -> Lane:
        return self._lanes.named("inputs")

    def send(self, inputs: Any, limit: int) -> WaitingInputs | None:
        """Start to copy the large ones of ``inputs`` to the host, while no more than ``limit``
        bytes are in use there. None: all stay on the device.
        """
        self.settle()
        # What the lane reads must be computed.
        self._lane.follow()
        copies, tensors = {}, []
        for tensor in tensors_in(inputs):
            if id(tensor) not in copies and self._is_large(tensor):
                copy = self._copy_of(tensor, limit)
                if copy is not None:
                    copies[id(tensor)] = copy
                    tensors.append(tensor.detach())  # with it the graph would be kept
        if not copies:
            return None
        before = None if self._last is None else self._last()
        waiting = WaitingInputs(self, inputs, copies, before)
        self._last = weakref.ref(waiting)
        with self._lane.memory():
            # The lane's stream is the current one here, so this is the end of its copies.
            end = self._lane.here()
        versions = [tensor._version for tensor in tensors]
        self._under_way = _UnderWay(self._last, tensors, versions, end)
        return waiting

    def fetch(self, waiting: WaitingInputs) -> list[torch.Tensor]:
        """Return the tensors of ``waiting`` on the device, and start the copies of those before."""
        tensors = self.settle(waiting)
        if tensors is None:
            self._start_to_fetch(waiting)
            tensors = self.settle(waiting)
            assert tensors is not None
        before = None if waiting.before is None else waiting.before()
        if before is not None:
            self._start_to_fetch(before)
        # All of them need a gradient: see _is_large().
        return [tensor.requires_grad_() for tensor in tensors]

    def settle(self, waiting: WaitingInputs | None = None) -> Sequence[torch.Tensor] | None:
        """Let the computation wait for the copy under way, and keep its tensors no longer; return
        them if they are those of ``waiting``.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        under_way.end.wait()
        inputs, tensors, versions = under_way.inputs(), under_way.tensors, under_way.versions
        # A later write comes after the copy.
        if inputs is not None and versions not in (None, [t._version for t in tensors]):
            inputs.is_stale = True
        return tensors if inputs is waiting else None

    def _start_to_fetch(self, waiting: WaitingInputs) -> None:
        values = [copy.values for copy in waiting.copies]
        tensors = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=self._device)
            for v in values
        ]
        # The memory may be some that the computation has just let go.
        self._lane.follow()
        with self._lane.memory():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value, non_blocking=True)
            self._under_way = _UnderWay(weakref.ref(waiting), tensors, None, self._lane.here())

    def _copy_of(self, tensor: torch.Tensor, limit: int) -> HostCopy | None:
        known = self._copies.get(id(tensor))
        if known is not None and known.is_of(tensor):
            return known
        memory = self.pool.take(tensor.numel() * tensor.itemsize, limit)
        if memory is None:
            return None
        copy = self._copies[id(tensor)] = HostCopy(tensor, memory, self.pool)
        with self._lane.memory():
            copy.values.copy_(tensor.detach(), non_blocking=True)
        return copy

    def _is_large(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a large activation. Leaves are kept by the graph anyway, and masks
        and positions, which need no gradient, by other layers.
        """
        return (
            type(tensor) is torch.Tensor
            and tensor.requires_grad
            and not tensor.is_leaf
            and tensor.numel() * tensor.itemsize >= SMALL
            and tensor.device == self._device
            and tensor.layout is torch.strided
            # The copy has the same strides, and no gaps.
            and tensor.stride() == torch.empty_like(tensor, device="meta").stride()
            and not is_gathered(tensor)
        )


def host_bytes_of(value: bool | int, *, use_checkpoint: bool, compile: bool) -> int:
    """Return what ``offload_inputs=value`` means: how many bytes of host memory the inputs of a
    block may wait in, together with those of all others. Raises :class:`ConfigError` if it is no
    such number or fits no block with the other arguments.
    """
    if type(value) is not bool and (type(value) is not int or value <= 0):
        raise ConfigError(
            f"offload_inputs must be True, False or a number of bytes, and not {value!r}."
        )
    if value and not use_checkpoint:
        raise ConfigError(
            f"offload_inputs={value!r} is for inputs that a recomputation needs, and with"
            " use_checkpoint=False there is none. Leave out one of the two."
        )
    if value and compile:
        raise ConfigError(
            f"offload_inputs={value!r} is not possible with compile=True: the compiled code keeps"
            " the inputs itself, on the device. Leave out one of the two."
        )
    return sys.maxsize if value is True else int(value)
