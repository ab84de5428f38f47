"""Activation checkpointing: non-reentrant, with the random numbers of forward, one gather for recomputation and backward.

What forward saves for backward is thrown away, and counted. When backward asks for the first of these tensors, forward
runs once more and keeps them, until as many are there: what comes after the last of them is not computed again.

[Note: why not torch's] ``torch.utils.checkpoint`` does the same. Per block it costs the host as much as the whole
forward and backward of a plain block, in objects, dictionaries and contexts for each saved tensor; with a small batch the
host is what a step waits for. Here a saved tensor costs one call to count it and one to hand it out, and the generators
are put back only if forward drew from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _device as torch_device

from bmt_core.errors import BmtError
from bmt_core.modules.outermost_call import forward_scope
from bmt_core.run.runtime import current
from bmt_zero.buffers import Buffers, BuffersBefore, version_of
from bmt_zero.caches import with_own_caches
from bmt_zero.nested import tensors_in
from bmt_zero.saved import check_version
from bmt_zero.use import Use

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Recomputation:
    """What one forward of a block, with ``buffers``, saved for backward: how many tensors, and how to make them again."""

    def __init__(self, call: Call, use: Use, buffers: Buffers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_running = False
        self._call = call
        self._use = use
        self._inputs = args, kwargs
        self._before = with_own_caches(self._inputs)
        self._versions = _versions_of(self._inputs)
        self._buffers = BuffersBefore(buffers)
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._made: list[tuple[torch.Tensor, int] | None] = []
        self._layers = 0
        self._last: tuple[int, int] | None = None
        self._random = _Random(current().device)
        self._circumstances = _Circumstances(current().device)
        # Weakly: what autograd saved holds this object, and with it the inputs, as long as backward may come.
        use.recomputation = weakref.ref(self)

    def forward(self) -> Any:
        """Return what the block returns, saving nothing but its inputs."""
        try:
            with saved_tensors_hooks(self._count, self._hand_out):
                outputs = self._call(*self._inputs)
            self._buffers.learn()
            return outputs
        finally:
            self._random.settle()
            self._buffers.keep_changed()

    def clear(self) -> None:
        """Let go what was made again: the backward pass is over."""
        self._made = []

    def before_layer(self, *operands: torch.Tensor) -> int:
        """Hear of a layer that saves ``operands`` and then computes; end here, if these are the last that backward needs.

        Returns what :meth:`after_layer` is to be told.
        """
        self._layers += 1
        if not self.is_running:
            return len(self._kinds)
        is_last = self._last == (self._layers, len(self._made))
        if is_last and len(self._made) + len(operands) == len(self._kinds):
            for operand in operands:
                self._keep(operand)
        return 0

    def after_layer(self, before: int, operands: int) -> None:
        """Hear that the layer is done."""
        if not self.is_running:
            # Unless somebody else, a hook of the user's inside the block, took what it saved.
            self._last = (self._layers, before) if len(self._kinds) == before + operands else None

    def _count(self, tensor: torch.Tensor) -> int:
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def _hand_out(self, index: int) -> torch.Tensor:
        made = self._made[index] if index < len(self._made) else None
        if made is None:
            self._made = []
            self._make()
            made = self._made[index]
            assert made is not None
        self._made[index] = None
        tensor, version = made
        check_version(tensor, version)
        return tensor

    def _make(self) -> None:
        if _versions_of(self._inputs) != self._versions:
            raise BmtError(
                "An input of a block was modified in place after the block had read it, and the block would be recomputed"
                " from the new values. Clone it before, use the out-of-place operation, or set use_checkpoint=False."
            )
        self._use.begin_backward()
        if self._use.is_running:  # a backward pass inside of forward, at the end of which nobody else will clear
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)
        layers, self._layers = self._layers, 0
        self.is_running = True
        try:
            with (
                saved_tensors_hooks(self._keep, _as_it_is),
                torch.enable_grad(),
                self._circumstances.again(),
                self._random.again(),
                forward_scope(own_random=False),
                self._buffers.again(),
            ):
                self._call(*with_own_caches(self._before))
        except _Complete:
            pass
        finally:
            self.is_running = False
            self._layers = layers
        if len(self._made) < len(self._kinds):
            raise BmtError(
                f"A block that was recomputed saved {len(self._made)} tensors for backward, and {len(self._kinds)} in its forward:"
                " it took another way. Its forward must depend on its arguments, parameters and torch's random numbers"
                " only; or set use_checkpoint=False."
            )

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        # Detached: an operation that saves its own result must not keep itself alive.
        tensor = tensor.detach()
        if self._buffers.moved:
            tensor = self._buffers.own(tensor)
        index = len(self._made)
        self._made.append((tensor, tensor._version))
        if (tensor.shape, tensor.dtype) != self._kinds[index]:
            shape, dtype = self._kinds[index]
            raise BmtError(
                f"A block that was recomputed saved a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, for backward where its"
                f" forward saved {tuple(shape)}, {dtype}. Its forward must depend on its arguments, parameters and torch's"
                " random numbers only; or set use_checkpoint=False."
            )
        if len(self._made) == len(self._kinds):
            raise _Complete
        return tensor


class _Complete(BaseException):
    """All that backward needs is there. No ``Exception``, which the block might catch."""


class _Random:
    """The generators' states before forward; kept if forward drew."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._states = [generator.get_state() for generator in self._generators]

    def settle(self) -> None:
        """Forget the states if nothing was drawn since."""
        pairs = zip(self._generators, self._states, strict=True)
        if all(torch.equal(generator.get_state(), state) for generator, state in pairs):
            self._generators, self._states = [], []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, draw what forward drew."""
        present = [generator.get_state() for generator in self._generators]
        _set_states(self._generators, self._states)
        try:
            yield
        finally:
            _set_states(self._generators, present)


class _Circumstances:
    """Autocast and the default device, which the recomputation must find as forward did."""

    def __init__(self, device: torch.device) -> None:
        self._types = dict.fromkeys(("cpu", device.type))
        self._autocast = self._present_autocast()
        self._device: torch.device | None = torch_device.CURRENT_DEVICE

    def again(self) -> AbstractContextManager[object]:
        """Inside, they are what they were."""
        same_device = self._device in (None, torch_device.CURRENT_DEVICE)
        if same_device and self._autocast == self._present_autocast():
            return nullcontext()
        stack = ExitStack()
        if self._device is not None:
            stack.enter_context(self._device)
        for kind, dtype, enabled, cached in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        return stack

    def _present_autocast(self) -> list[tuple[str, torch.dtype, bool, bool]]:
        cached = torch.is_autocast_cache_enabled()
        return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached) for kind in self._types]


def _versions_of(values: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_in(values)]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
