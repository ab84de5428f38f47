"""Activation checkpointing: non-reentrant, with forward's random numbers, and one gather for
recomputation and backward.

Forward counts the tensors that it would save for backward, and does not keep them. When backward
asks for the first of them, forward runs again and keeps them. It stops when it has as many as
forward counted, so nothing after the last one is recomputed.

[Note: why not torch's] ``torch.utils.checkpoint`` does the same. But its objects, dictionaries and
contexts for each saved tensor cost the host as much per block as the whole forward and backward of
a plain block, and with a small batch a step waits for the host. Here a saved tensor costs one call
to count it and one to return it, and generator states are restored only if forward drew
random numbers.

[Note: views of freed buffers] Without recomputation, at level 3, autograd saves views of whole
parameters that are freed after forward. The buffer must be gathered when such a view is unpacked,
because reading a freed buffer would crash the process. Ordinarily ``Leave`` gathers it. But
backward can also reach a block without passing its outputs, from an auxiliary loss kept on the
module or a hook on an inner feature. So unpacking a view gathers the buffer if nobody has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bmt_core.errors import BmtError
from bmt_core.torch_internals import (
    version_of,
    when_backward_ends,
    without_script_optimization,
    without_torch_functions,
)
from bmt_params.modules.outermost_call import module_call
from bmt_params.nested import tensors_in
from bmt_zero.block_call import BlockCall
from bmt_zero.forward_state import (
    BlockBuffers,
    BuffersBeforeForward,
    Modes,
    RandomNumbers,
    with_own_caches,
)
from bmt_zero.host_inputs import WaitingInputs
from bmt_zero.kept_results import KeptResults

Compute = Callable[
    [BlockCall, "Recomputation", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]


class Recomputation:
    """The tensors that the forward of ``call`` saves for backward: their shapes and dtypes, and how
    to recompute them.

    ``compute(call, recomputation, function, args, kwargs)`` runs the block's code, ``function``.
    ``kept``: the results that are not computed again, if any. ``host_bytes``: how many bytes of
    host memory inputs that wait for backward may take.
    """

    def __init__(
        self,
        call: BlockCall,
        compute: Compute,
        function: Callable[..., Any],
        buffers: BlockBuffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: KeptResults | None = None,
        host_bytes: int = 0,
    ) -> None:
        device = call.state.run.device
        self.is_running = False
        self.kept = kept
        self.device_type = device.type
        self.captured: list[torch.Tensor] | None = None
        self.layers = 0
        self._call = call
        self._compute = compute
        self._function = function
        self._given: Any = (args, kwargs)  # until forward
        self._inputs = with_own_caches(self._given)
        self._has_caches = self._inputs is not self._given
        self._host_bytes = host_bytes
        self._on_host: WaitingInputs | None = None
        self._versions = _versions_of(self._inputs)
        self._buffers = BuffersBeforeForward(buffers)
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._recomputed: list[tuple[torch.Tensor, int] | None] = []
        self._last: tuple[int, int] | None = None
        self._random = RandomNumbers(device)
        self._modes = Modes(device)
        # Weakly: autograd's saved tensors keep this object, and with it the inputs, as long as
        # backward may come.
        call.recomputation = weakref.ref(self)

    @property
    def count(self) -> int:
        """How many tensors forward has saved for backward so far."""
        return len(self._kinds)

    def forward(self) -> Any:
        """Run forward and return its outputs. Only the inputs are kept."""
        given, self._given = self._given, None
        if self._host_bytes:
            self._send_inputs()
        try:
            with saved_tensors_hooks(self._count, self._hand_out), without_script_optimization():
                if self.kept is None:
                    outputs = self._compute(self._call, self, self._function, *given)
                else:
                    with self.kept.running(self):
                        outputs = self._compute(self._call, self, self._function, *given)
            self._buffers.end_forward()
            return outputs
        finally:
            self._random.forget_unless_drawn()
            self._buffers.forget_constants()

    def clear(self) -> None:
        """Free the recomputed tensors. Called when the backward pass is over."""
        self._recomputed = []

    def before_layer(self, input: torch.Tensor) -> int:
        """Called before a layer saves ``input`` and computes. Ends a recomputation if backward
        needs no tensor after ``input``.
        """
        self.layers += 1
        if not self.is_running:
            return len(self._kinds)
        # See [Note: save before computing] in bmt_zero.direct_linear.
        if self._last == (self.layers, len(self._recomputed)) and len(self._recomputed) + 1 == len(
            self._kinds
        ):
            self.hand_in(input)
        return 0

    def after_layer(self, before: int) -> None:
        """Called after the layer has computed."""
        if not self.is_running:
            # None if a user's hooks inside the block took the saved tensor.
            self._last = (self.layers, before) if len(self._kinds) == before + 1 else None

    def may_free(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` is that of gathered parameters."""
        return self._call.state.may_free_memory_of(tensor)

    def random_states(self) -> list[torch.Tensor]:
        """Return the present states of the generators."""
        return self._random.present()

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the states of the generators, unless forward drew nothing."""
        self._random.skip_to(states)

    def _count(self, tensor: torch.Tensor) -> int:
        self._kinds.append((tensor.shape, tensor.dtype))
        if self.captured is not None:
            self.captured.append(tensor)
        return len(self._kinds) - 1

    def _hand_out(self, index: int) -> torch.Tensor:
        saved = self._recomputed[index] if index < len(self._recomputed) else None
        if saved is None:
            # The first one of this pass, or of a second one over a retained graph.
            self._recomputed = []
            self._recompute()
            saved = self._recomputed[index]
            assert saved is not None
        # Backward needs each once, so memory goes as backward proceeds.
        self._recomputed[index] = None
        tensor, version = saved
        if tensor._version != version:
            raise _modified(tensor, version)
        return tensor

    def _send_inputs(self) -> None:
        with without_torch_functions():
            host_inputs = self._call.state.run.host_inputs
            self._on_host = host_inputs.send(self._inputs, self._host_bytes)
        if self._on_host is not None:
            self._inputs = self._on_host.inputs
            self._versions = _versions_of(self._inputs)

    def _recompute(self) -> None:
        inputs, is_stale = self._inputs, _versions_of(self._inputs) != self._versions
        if self._on_host is not None:
            with without_torch_functions():
                inputs = self._on_host.on_device()
            is_stale = is_stale or self._on_host.is_stale
        if is_stale:
            raise BmtError(
                "An input of a block was modified in place after the block's forward, so the block"
                " would be recomputed from the new values. Clone it before, use the out-of-place"
                " operation, or set use_checkpoint=False."
            )
        self._buffers.check_unchanged()
        # Usually Leave has gathered; without the block's outputs in the pass nobody has.
        self._call.begin_backward()
        # A backward pass inside of forward, at whose end nobody else calls clear().
        if self._call.is_computing:
            when_backward_ends(self.clear)
            if self.kept is not None:
                self.kept.forget()
        layers, self.layers = self.layers, 0
        self.is_running = True
        try:
            with (
                saved_tensors_hooks(self.hand_in, _as_it_is),
                without_script_optimization(),
                torch.enable_grad(),
                self._modes.restored(),
                self._random.repeated(),
                # Not the stream of a new call: repeated() has set that of forward.
                module_call(own_random=False),
                self._buffers.restored(),
            ):
                if self._has_caches:  # a copy again: a retained graph recomputes twice
                    inputs = with_own_caches(inputs)
                if self.kept is None:
                    self._compute(self._call, self, self._function, *inputs)
                else:
                    with self.kept.running(self):
                        self._compute(self._call, self, self._function, *inputs)
        except (_Complete, RuntimeError):
            # Inside a function of torch.jit.script, _Complete becomes a RuntimeError.
            if len(self._recomputed) < len(self._kinds):
                raise
        finally:
            self.is_running = False
            self.layers = layers
        if len(self._recomputed) < len(self._kinds):
            raise BmtError(
                f"A block saved {len(self._recomputed)} tensors for backward when it was"
                f" recomputed, but {len(self._kinds)} in its forward. Its forward must depend on"
                " its arguments, parameters and torch's random numbers only; or set"
                " use_checkpoint=False."
            )

    def hand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the next tensor that backward needs, in a recomputation, which ends with the
        last one.
        """
        index, needed = len(self._recomputed), len(self._kinds)
        if index == needed:  # after the last one, whose _Complete the block's code has caught
            raise _Complete
        # An operation that saves its own result must not keep itself alive.
        tensor = tensor.detach()
        if self._buffers.are_rewritten:
            tensor = self._buffers.with_own_memory(tensor)
        self._recomputed.append((tensor, tensor._version))
        if (tensor.shape, tensor.dtype) != self._kinds[index]:
            shape, dtype = self._kinds[index]
            raise BmtError(
                f"A block saved a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, for"
                f" backward when it was recomputed, but {tuple(shape)}, {dtype}, in its forward."
                " Its forward must depend on its arguments, parameters and torch's random numbers"
                " only; or set use_checkpoint=False."
            )
        if index + 1 == needed:
            raise _Complete
        return tensor


class _Complete(BaseException):
    """Stops a recomputation when all tensors are there. A BaseException, because the block's code
    may catch ``Exception``.
    """


def _versions_of(values: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_in(values)]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_Saved = tuple[torch.Tensor, int, bool]
"""A tensor, its version, and whether it is a gathered parameter. Not a NamedTuple, which takes two
more calls, for each saved tensor.
"""


def saved_for_backward(call: BlockCall) -> saved_tensors_hooks:
    """Return the context manager for the forward of a block at level 3 without recomputation."""

    def pack(tensor: torch.Tensor) -> _Saved:
        # Detached: an operation that saves its own result must not keep itself alive.
        kept = tensor.detach()
        return kept, kept._version, call.state.may_free_memory_of(kept)

    def unpack(saved: _Saved) -> torch.Tensor:
        kept, version, is_parameter = saved
        if is_parameter:
            call.begin_backward()
        elif kept._version != version:
            raise _modified(kept, version)
        return kept

    return saved_tensors_hooks(pack, unpack)


def _modified(tensor: torch.Tensor, version: int) -> BmtError:
    """Return the error that torch would raise: it does not check tensors that pass
    through hooks.
    """
    return BmtError(
        "A tensor that a block needs for its backward was modified by an in-place operation"
        f" (shape {tuple(tensor.shape)}, version {tensor._version} where {version} was saved)."
        " Use the out-of-place operation, or clone before it."
    )
