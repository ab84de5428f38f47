"""``ZeroRun``: the state that all blocks of a run share, from the first block to shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import (
    backward_pass,
    call_after,
    storage_key,
    without_script_optimization,
    without_torch_functions,
)
from bmt_core.user_warnings import warn_user
from bmt_params.guards.first_values import FirstValues
from bmt_params.models_of_run import CallEnd, ModelsOfRun
from bmt_params.modules.outermost_call import is_gathered
from bmt_params.parameter import DistributedParameter, reduce_held_back
from bmt_zero import adapters
from bmt_zero.gradient_ledger import ReductionsInFlight
from bmt_zero.host_inputs import HostInputs
from bmt_zero.outside_modules import shard_outside
from bmt_zero.param_dtype import note_compute_dtypes
from bmt_zero.parameter_group import ParameterGroup, gathered_memory
from bmt_zero.prefetch import Prefetch
from bmt_zero.root_group import OutsideParameters
from bmt_zero.written_buffers import WrittenBuffers


class EndedCall(Protocol):
    """The interface of a block's call for :class:`ZeroRun`."""

    def end(self) -> None:
        """Release everything that the call holds."""

    def forget_gradients(self) -> None:
        """Drop the gradients that a failed backward pass has reduced and not put into ``.grad``."""


class ZeroRun:
    """The run's prefetching, reductions under way, calls of blocks, and hooks in torch, which are
    removed at shutdown.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.device
        gathered_memory.begin_run()
        self.blocks: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """All Blocks, by the numbers of their states."""
        self.wrapped: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Wrapped models, each with the count of changes of modules when it was last looked
        through.
        """
        self.dtypes: WeakKeyDictionary[nn.Module, torch.dtype | None] = WeakKeyDictionary()
        """The ``param_dtype`` of each wrapped model."""
        self.prefetch = Prefetch(runtime.settings.prefetch_bytes)
        self.in_flight = ReductionsInFlight()
        self.outside = OutsideParameters(self.in_flight)
        self.host_inputs = HostInputs(runtime)
        self.running: list[list[ParameterGroup]] = []
        """The groups of the blocks whose forward runs."""
        self.calls_in_pass: dict[EndedCall, None] = {}
        """The calls that take part in a backward pass that has not ended."""
        self._calling_thread = threading.get_ident()
        self._warns_of_lists = self._warns_of_adapters = runtime.rank == 0
        self.module_changes = ModuleChanges(runtime.device, self._is_gathered)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(_after_step),
        ]
        # A function of torch.jit.script that calls outside of Blocks have optimized stays optimized
        # inside of them, and saves other tensors for backward. A recomputation must save the same
        # tensors as forward, so no function is optimized while there are Blocks.
        self._until_close = ExitStack()
        self._until_close.enter_context(without_script_optimization())
        self._written_buffers = WrittenBuffers(runtime)
        models = runtime.state(ModelsOfRun)
        models.at_calls.append(self._call_begins)
        models.at_saves.append(self._written_buffers.before_save)
        # Inside of Optimizer.__init__, before a subclass makes states for the parameters.
        runtime.at_shutdown.append(call_after(Optimizer, "add_param_group", self._shard_added))
        runtime.at_shutdown.append(self._close)

    def before_listing_parameters(self) -> None:
        """Put the parameters of a failed backward pass back into the modules, before
        ``model.zero_grad()`` looks for them there.

        Only on the thread that calls the model: while another thread lists parameters, a backward
        pass may be under way.
        """
        if self.calls_in_pass and threading.get_ident() == self._calling_thread:
            self.end_failed_passes()

    def end_failed_passes(self) -> None:
        """Release what failed backward passes hold, at a call, a step, a state_dict, or before
        parameters are listed.

        torch may free the graph of a failed pass at any time (on GPUs on another thread), at
        different times on different ranks. So all calls, those of other graphs too, release what
        they hold, and everything is gathered again.
        """
        if self.calls_in_pass and backward_pass() == -1:
            failed = list(self.calls_in_pass)
            for call in failed:
                call.end()
            self.calls_in_pass.clear()
            self.prefetch.reset()
            self.host_inputs.settle()  # its copy's tensors would wait for a call that never comes
            # Last, because it waits for reductions, which raises if a rank is gone.
            for call in failed:
                call.forget_gradients()

    def warn_once_of_list_output(self, module: nn.Module) -> None:
        """Warn once, on rank 0, that a returned list stays a list; BMTrain's Block turned it into
        a tuple.
        """
        if self._warns_of_lists:
            self._warns_of_lists = False
            warn_user(
                f"{type(module).__name__} returned a list, as its module does; BMTrain's Block"
                " returned a tuple. If your code needs a tuple, let the module return one. This is"
                " said once."
            )

    def say_what_adapters_cost(self, model: nn.Module) -> None:
        """Say once, on rank 0, that ``model`` has adapters of a wider dtype than its layers, and
        what to do, if so.
        """
        base = adapters.narrow_layers_of_wide_adapters(model)
        if base is not None and self._warns_of_adapters:
            self._warns_of_adapters = False
            print(
                f"bmt: {type(model).__name__}: its adapters are float32 in a model of {base}:"
                " they are gathered and multiplied in float32, which can take a third more time."
                f" Wrap it with BMTrainModelWrapper(model, param_dtype={base}): they are stepped"
                f" in float32, and gathered and multiplied in {base}.",
                flush=True,
            )

    def _call_begins(self, module: nn.Module) -> CallEnd:
        # On GPUs, what backward computes again is called on torch's thread.
        if backward_pass() == -1:
            self._calling_thread = threading.get_ident()
        with without_torch_functions():
            self.end_failed_passes()
            if module in self.wrapped:
                self._shard_outside(module)
            changes = self.module_changes.count
            if self._written_buffers.without.get(module) != changes:
                self._written_buffers.call_begins(module, changes)
            end = self.outside.call_begins(module)
            if "_bmt_block" not in module.__dict__:  # a block notes its own call
                self.prefetch.call_begins(module)

        def call_ends(read: Sequence[torch.Tensor] | None) -> None:
            if read is not None:  # otherwise the error that ends the call is told with its place
                self.prefetch.call_ends()
            end(read)

        return call_ends

    def _shard_added(self, optimizer: Optimizer, result: None) -> None:
        """Shard the parameters of the optimizer's new group that were put into Blocks since the
        last calls of these. See [Note: added parameters].
        """
        group = optimizer.param_groups[-1]["params"]
        added = {id(p) for p in group if not isinstance(p, DistributedParameter)}
        # By number, which is the same order on all ranks, because sharding is collective.
        for _, block in sorted(self.blocks.items()) if added else ():
            if not added.isdisjoint(map(id, block.parameters())):
                block._bmt_block.state.refresh(block)
        for model in list(self.wrapped) if added else ():
            if not added.isdisjoint(map(id, model.parameters())):
                self._shard_outside(model)
                self.say_what_adapters_cost(model)

    def _shard_outside(self, model: nn.Module) -> None:
        """Shard parameters that were put into the wrapped ``model``, in no Block, since the last
        look. On stages and other axes they stay ordinary: other ranks may not have them.
        """
        if self.wrapped[model] != self.module_changes.count and not current().topology.other_axes:
            dtype = self.dtypes[model]
            if dtype is not None:
                note_compute_dtypes(model, dtype)
            shard_outside(model)
            self.wrapped[model] = self.module_changes.count
            # The comparison at the begin of this call came before these parameters were noted.
            current().state(FirstValues).compare()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.end_failed_passes()
        reduce_held_back(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )

    def _is_gathered(self, tensor: torch.Tensor) -> bool:
        storages = {group.buffer.storage for groups in self.running for group in groups}
        return is_gathered(tensor) or storage_key(tensor) in storages

    def _close(self) -> None:
        self.module_changes.close()
        for handle in self._handles:
            handle.remove()
        self._until_close.close()


def zero_run() -> ZeroRun:
    """Return the :class:`ZeroRun` of the current run, made at the first call."""
    return current().state(ZeroRun)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with without_torch_functions():
        # A parameter without a gradient was not stepped, on any rank.
        references = [
            parameter.owner_reference
            for group in optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DistributedParameter) and parameter.grad is not None
        ]
        # Once for each owner: an optimizer has many parameters of one Block.
        for owner in {reference() for reference in references if reference is not None}:
            if owner is not None:
                owner.note_update()


class ModuleChanges:
    """Counts from its construction until :meth:`close`.

    ``is_gathered(tensor)`` says whether a tensor is a gathered parameter; setting one as a module's
    own parameter is an error.
    """

    def __init__(self, device: torch.device, is_gathered: Callable[[torch.Tensor], bool]) -> None:
        self.count = 0
        self._device = device
        self._is_gathered = is_gathered
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._changed),
            torch_module.register_module_module_registration_hook(self._module_changed),
            torch_module.register_module_buffer_registration_hook(self._buffer_changed),
        ]

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def _changed(self, module: Any, name: str, value: Any) -> None:
        self.count += 1
        self._check(module, name, value)

    def _module_changed(self, module: Any, name: str, value: nn.Module | None) -> None:
        self.count += 1
        adapters.added(module, value)

    def _buffer_changed(self, module: Any, name: str, value: torch.Tensor | None) -> None:
        # Many forwards replace a buffer by another on the same device, which changes nothing for
        # the block.
        if name not in module._buffers or (value is not None and value.device != self._device):
            self.count += 1
        self._check(module, name, value)

    def _check(self, module: Any, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and _has_memory(value) and self._is_gathered(value):
            raise ConfigError(
                f"{type(module).__name__} was given a gathered parameter as its own {name!r}. It"
                " would be a new leaf, and the sharded parameter no gradient. Slicing an"
                " nn.ParameterList does that: index it, or loop over its indices."
            )


def _has_memory(value: torch.Tensor) -> bool:
    # Others have no storage that could be compared.
    return value.layout is torch.strided and not torch.nn.parameter.is_lazy(value)
