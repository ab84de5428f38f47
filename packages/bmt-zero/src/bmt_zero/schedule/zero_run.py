"""``ZeroRun``: what all blocks of a run share, from the first block to shutdown."""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bmt_core.modules.outermost_call import is_gathered
from bmt_core.params.parameter import DistributedParameter, reduce_held_back
from bmt_core.run.runtime import CallEnd, Runtime, current
from bmt_core.torch_internals import backward_pass
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.schedule.module_changes import ModuleChanges
from bmt_zero.schedule.outside_parameters import OutsideParameters
from bmt_zero.schedule.prefetch import Prefetch
from bmt_zero.schedule.sharded_group import ShardedGroup


class EndedCall(Protocol):
    """A call of a block that can be ended."""

    def end(self) -> None:
        """Hold nothing any more."""


class ZeroRun:
    """What is gathered ahead, which reductions are under way, and torch's hooks, which are taken out at shutdown."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.device
        self.prefetch = Prefetch(runtime.settings.prefetch_bytes)
        self.in_flight = ReductionsInFlight()
        self.outside = OutsideParameters(self.in_flight)
        self.running: list[list[ShardedGroup]] = []
        """The groups of the blocks whose forward runs."""
        self.calls_in_pass: dict[EndedCall, None] = {}
        """Calls that take part in a backward pass that has not ended."""
        self.calls_at_rest: dict[int, list[ShardedGroup]] = {}
        """The groups whose buffers calls keep between forward and backward, by the numbers of the calls."""
        self._warns_of_lists = runtime.rank == 0
        self.module_changes = ModuleChanges(runtime.device, self._is_gathered)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(_after_step),
        ]
        # A function of torch.jit.script that is optimized by calls outside of Blocks is so inside of them from then on, and saves
        # other tensors for backward: a recomputation would find others than its forward saved. So none is, while there are Blocks.
        self._until_close = ExitStack()
        self._until_close.enter_context(torch.jit.optimized_execution(False))
        runtime.call_observers.append(self._call_begins)
        runtime.at_shutdown.append(self._close)

    def end_failed_passes(self) -> None:
        """Let go what backward passes hold that failed. Called where something new begins, at the same point on every rank.

        When torch lets go of the graph of a failed pass is not: on GPUs another thread may do so, at any time. So nothing stays
        held, by calls of other graphs neither, and everything is gathered anew.
        """
        if self.calls_in_pass and backward_pass() == -1:
            for call in list(self.calls_in_pass):
                call.end()
            self.calls_in_pass.clear()
            while self.calls_at_rest:
                _, groups = self.calls_at_rest.popitem()
                for group in groups:
                    group.release_at_rest()
            self.prefetch.forget_gathered()

    def say_that_lists_stay_lists(self, module: nn.Module) -> None:
        """Warn, once, on rank 0: BMTrain's Block made a tuple of a list that its module returned."""
        if self._warns_of_lists:
            self._warns_of_lists = False
            warnings.warn(
                f"{type(module).__name__} returned a list, as its module does, where BMTrain's returned a tuple. If your"
                " code asks for a tuple, let the module return one. This is said once.",
                UserWarning,
                stacklevel=4,
            )

    def _call_begins(self, module: nn.Module) -> CallEnd:
        self.end_failed_passes()
        end = self.outside.call_begins(module)
        if "_bmt_block" not in module.__dict__:  # a block says itself when it is called
            self.prefetch.call_begins(module)
        return end

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.end_failed_passes()
        reduce_held_back(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _is_gathered(self, tensor: torch.Tensor) -> bool:
        return is_gathered(tensor) or any(g.buffer.holds_memory_of(tensor) for groups in self.running for g in groups)

    def _close(self) -> None:
        self.module_changes.close()
        for handle in self._handles:
            handle.remove()
        self._until_close.close()


_runs: weakref.WeakKeyDictionary[Runtime, ZeroRun] = weakref.WeakKeyDictionary()


def zero_run() -> ZeroRun:
    """Return what the blocks of the current run share, made when it is first asked for."""
    runtime = current()
    if runtime not in _runs:
        _runs[runtime] = ZeroRun(runtime)
    return _runs[runtime]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    references = [
        parameter.owner_reference
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, DistributedParameter) and parameter.grad is not None
    ]
    for owner in {reference() for reference in references if reference is not None}:
        if owner is not None:
            owner.note_update()
