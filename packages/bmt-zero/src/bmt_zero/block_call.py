"""``BlockCall``: one call of a block, from its forward to the end of its backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch.utils.hooks import RemovableHandle

from bmt_core.errors import BmtError
from bmt_core.torch_internals import (
    accumulates,
    backward_pass,
    has_gradient_hooks,
    when_backward_ends,
    without_torch_functions,
)
from bmt_params.modules.block_use import BlockUse
from bmt_params.modules.layer_gradients import running_backward
from bmt_params.modules.postponed_gradients import postponing
from bmt_zero.block_state import BlockState, ParameterSlots, SlotValues
from bmt_zero.call_gradients import CallGradients
from bmt_zero.direct_linear import DeferredGradient, ParameterIndex
from bmt_zero.kept_results import SavedTensors
from bmt_zero.parameter_group import Lease, ParameterGroup

_numbers = itertools.count()


class Phase(Enum):
    """Which part of a call runs."""

    REST = auto()
    """None: before forward, between forward and backward, or after backward."""
    FORWARD = auto()
    BACKWARD = auto()


class BlockCall:
    """Holds a block's whole parameters while one call needs them, and reduces or keeps the
    call's gradients.

    ``use`` is its place in the step. ``foreign`` gets, by id of the parameter, the whole parameters
    that the block uses but does not shard. ``writes_directly``: linear layers may write their
    gradients into the tensor that is reduced. ``leaf`` is the empty leaf that identifies an
    ordinary ``backward()``: see [Note: the two nodes].
    """

    def __init__(self, state: BlockState, use: BlockUse) -> None:
        self.number = next(_numbers)
        self.state = state
        self.use = use
        # The groups of this call: the block's may change before its backward.
        self.groups = list(state.groups)
        # See [Note: small weights] in bmt_zero.direct_linear.
        self.takes_small = state.level < 2 or not (use.first_backward and use.last_backward)
        self.phase = Phase.REST
        self.foreign: dict[int, torch.Tensor] = {}
        self.writes_directly = True
        self.leaf: torch.Tensor | None = None
        self.recomputation: weakref.ref[SavedTensors] | None = None
        self.input_hook: RemovableHandle | None = None
        self.kept_bytes: object = None  # those that compiled code keeps until the end
        self._lease: Lease = "call", self.number  # while its forward or its backward runs
        self._rest: Lease = "rest", self.number
        self._pass = -1  # the backward pass whose end is watched
        self._versions: list[int] = []
        # Which parameters of each group required gradients in forward.
        self._trains: list[list[bool]] = []
        self._leaves: dict[ParameterGroup, list[torch.Tensor]] = {}
        # By the address of a leaf: the number of its group, its number in that group, and the leaf.
        self._leaf_at: dict[int, tuple[int, int, torch.Tensor]] = {}
        # Put into the modules by backward.
        self._whole: tuple[ParameterSlots, SlotValues] | None = None
        # Of the backward under way, by the number of the group.
        self._gradients: dict[int, CallGradients] = {}

    @property
    def is_computing(self) -> bool:
        """Whether the block's forward code runs for this call. A backward pass that runs meanwhile
        was started by that code.

        Then the parameters are whole and must stay so, and the gradients are returned to that code
        (``torch.autograd.grad``).
        """
        return self.state.running.call is self

    @property
    def writes(self) -> list[int]:
        """How often user code wrote to the whole parameters of each group, by torch's version
        counter; 0 if they are not gathered.
        """
        return [group.buffer.tensor._version if group.is_gathered else 0 for group in self.groups]

    def begin_forward(self) -> None:
        """Gather the parameters. Collective."""
        self.phase = Phase.FORWARD
        self._acquire(looks=self.use.first_forward)
        # Backward compares them: a step in between would make its gradients wrong.
        self._versions = [group.data.number for group in self.groups]
        # A parameter that is frozen or unfrozen in between is treated as forward recorded it.
        self._trains = [
            [parameter.requires_grad for parameter in group.parameters] for group in self.groups
        ]

    def end_forward(self, *, succeeded: bool, backward_follows: bool) -> None:
        """Release the parameters, except those that are kept until backward."""
        self.phase = Phase.REST
        if succeeded:
            self.state.keep_gathered(self.groups, until_next=not self.use.last_forward)
        # At level 3 the memory goes, and backward gathers again.
        if backward_follows and self.state.level < 3:
            for group in self.groups:
                group.buffer.take(self._rest)
        # After the other leases are taken, because giving back the last one frees the memory.
        self._let_go()

    def begin_backward(self) -> None:
        """Gather the parameters again and put them into the modules. Collective.

        Raises ``RuntimeError`` if they have changed since forward.
        """
        # Also called by the recomputation, by layers and by saved views: the first one gathers.
        if self.phase is Phase.BACKWARD or self.is_computing:
            return
        self._gradients.clear()
        # Before what may raise, so that the next call or step ends this one.
        self.watch_end_of_pass()
        if self.use.first_backward:
            for group in self.groups:
                group.look_for_changes()
        if self._versions != [group.data.number for group in self.groups]:
            raise RuntimeError(
                "The parameters of a block were changed between its forward and its backward, so"
                " its gradients would be wrong. Run backward before the optimizer's step, or run"
                " forward again."
            )
        self.phase = Phase.BACKWARD
        self._acquire(looks=False)
        self._leaves = {
            g: g.leaves(trains) for g, trains in zip(self.groups, self._trains, strict=True)
        }
        # The buffer may have got other memory than in the pass before.
        self._leaf_at.clear()
        slots, whole = self.state.slots, self.state.whole_for_backward(self._leaves, self.foreign)
        # For code that backward calls again, such as torch.utils.checkpoint inside the block.
        slots.put(whole)
        # These slots, because the block has others after its modules have changed.
        self._whole = slots, whole
        self._keep_products()
        self.state.running.takes_small = self.takes_small
        running_backward.buffers = self

    def _keep_products(self) -> None:
        """Keep products of layers if a schedule postpones them, or until :meth:`end_backward` if
        they are added to a sum.

        Only at the end it is known to which parameters' gradients this pass adds.
        """
        reduces, is_postponing = self.use.last_backward, postponing.gradients is not None
        numbers = [
            n
            for n, g in enumerate(self.groups)
            if is_postponing or g.ledger.adds_products(reduces=reduces)
        ]
        # torch.autograd.grad() returns the gradients, so they are needed in this pass.
        if numbers and self.leaf is not None and accumulates(self.leaf):
            for number in numbers:
                # A hook must see the gradient in this pass.
                if not has_gradient_hooks(self.groups[number].parameters):
                    self._gradients_of(number, keeps_products=True)

    def accept(self, index: ParameterIndex, gradient: DeferredGradient) -> bool:
        if not self.writes_directly or self.is_computing:
            return False
        return self._gradients_of(index.group).accept(index.parameter, gradient)

    def reserve_gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        if not self.writes_directly or self.is_computing:
            return None
        if not self._leaf_at:  # once a pass; layers know their weights by the memory only
            for number, leaves in enumerate(self._leaves.values()):
                self._leaf_at |= {
                    leaf.data_ptr(): (number, index, leaf) for index, leaf in enumerate(leaves)
                }
        number, index, leaf = self._leaf_at.get(weight.data_ptr(), (0, 0, None))
        # A view of a parameter, such as its first rows, begins at the same address.
        if leaf is None or leaf.shape != weight.shape or leaf.dtype != weight.dtype:
            return None
        return self._gradients_of(number).reserve(index)

    def end_backward(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], is_ordinary: bool
    ) -> Sequence[torch.Tensor | None]:
        """Reduce the whole gradients, or postpone this. Return the gradients of the shards for
        autograd. Collective.

        ``is_ordinary``: the pass accumulates into all leaves, see [Note: the two nodes]
        in block_engine.py.
        """
        try:
            return self._reduce(grads, needed, is_ordinary=is_ordinary)
        finally:
            self._end_backward()

    def end(self) -> None:
        """Release everything: the backward pass is over, has failed, or will never run."""
        self._pass = -1
        recomputation = None if self.recomputation is None else self.recomputation()
        if recomputation is not None:
            recomputation.clear()
        self.kept_bytes = None
        self._end_backward()
        if self.input_hook is not None:
            self.input_hook.remove()

    def forget_gradients(self) -> None:
        """Drop the gradients that a failed backward pass has reduced and not put into ``.grad``."""
        for group in self.groups:
            group.ledger.sum.forget_if_cleared()

    def end_pass(self) -> None:
        """Complete the gradients and free the gathered parameters, after a backward pass that
        has succeeded.
        """
        # A call that stays in this list is one whose pass has failed.
        self.state.run.calls_in_pass.pop(self, None)
        self.end()
        with without_torch_functions():
            for group in self.groups:
                group.ledger.end_pass()
        # The optimizer is about to change what was gathered ahead, and to read the gradients.
        self.state.run.prefetch.drop()
        self.state.run.in_flight.wait()

    def __del__(self) -> None:
        # The graph was freed without a backward: the output was not used, or an exception
        # was raised.
        self.end()

    def watch_end_of_pass(self) -> None:
        """Let the end of the pass end the call. Raises :class:`BmtError` if an earlier pass has
        failed, and nothing has noticed that.
        """
        this_pass = backward_pass()
        if self._pass == this_pass:
            return
        if self._pass != -1:
            raise BmtError(
                "A backward pass through this graph has failed, and what it had computed would be"
                " counted twice. Call model.zero_grad() before the next pass, or run forward again."
            )
        self._pass = this_pass
        self.state.run.calls_in_pass[self] = None
        when_backward_ends(self.end_pass)  # a failed one ends with the next call or step

    def _end_backward(self) -> None:
        self._gradients.clear()
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.REST
            running_backward.buffers = None
            # A call that is not the last forward is followed by another backward or forward.
            is_followed = not (self.use.last_backward or self.use.last_forward)
            self.state.keep_gathered(self.groups, until_next=is_followed)
        for group in self.groups:
            # Also without a backward, when the graph was freed.
            if self._rest in group.buffer.at_rest:
                group.buffer.give_back(self._rest)
        self._let_go()

    def _let_go(self) -> None:
        if self._whole is not None:
            (slots, whole), self._whole = self._whole, None
            slots.take_out(whole)
        for group in self.groups:
            # Only what was taken: giving back a call's lease says that its reads end here.
            if self._lease in group.buffer.leases:
                group.buffer.give_back(self._lease)

    def _acquire(self, *, looks: bool) -> None:
        # All ranks come here in the same order, so their gathers are in the same order.
        self.state.run.prefetch.enters(self.state, is_backward=self.phase is Phase.BACKWARD)
        try:
            for group in self.groups:
                if looks:
                    group.look_for_changes()
                group.start_gather(self._lease)
            # Queued before the wait: the next block arrives while this one computes.
            self.state.run.prefetch.begins(self.state, is_backward=self.phase is Phase.BACKWARD)
            for group in self.groups:
                group.wait()
        except BaseException:
            self._let_go()
            self.phase = Phase.REST
            raise

    def _gradients_of(self, number: int, *, keeps_products: bool = False) -> CallGradients:
        if number not in self._gradients:
            self._gradients[number] = CallGradients(
                self.groups[number], self.state.may_free_memory_of, keeps_products=keeps_products
            )
        return self._gradients[number]

    def _reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], *, is_ordinary: bool
    ) -> list[torch.Tensor | None]:
        results: list[torch.Tensor | None] = []
        if self._whole is not None:
            grads = _with_gradients_of(
                [leaf for leaves in self._leaves.values() for leaf in leaves], grads
            )
        for number, group in enumerate(self.groups):
            own = slice(len(results), len(results) + len(group.parameters))
            # Not asked for on this rank means not on any: requires_grad is the same on all ranks.
            if True in needed[own]:
                # To which leaves this pass adds: all in backward(), none in autograd.grad(), some
                # in backward(inputs=...).
                into_grad = [
                    need and (p.requires_grad if is_ordinary else accumulates(p))
                    for need, p in zip(needed[own], group.parameters, strict=True)
                ]
                if True in into_grad:
                    # The pass may come by weights alone, past Leave and the layers: then nobody
                    # has called begin_backward().
                    self.watch_end_of_pass()
                gradients = self._gradients_of(number)
                results += gradients.end_backward(
                    grads[own], needed[own], into_grad, reduces=self.use.last_backward
                )
            else:
                results += [None] * len(group.parameters)
        return results


def _with_gradients_of(
    leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return ``grads`` plus the ``.grad`` of ``leaves``, which is cleared.

    Leaves get gradients from parts of the block that ``torch.utils.checkpoint(use_reentrant=True)``
    differentiates separately.
    """
    arrived = [leaf.grad for leaf in leaves]
    if arrived.count(None) == len(arrived):
        return grads
    for leaf in leaves:
        leaf.grad = None
    return [
        grad if own is None else own if grad is None else grad + own
        for grad, own in zip(grads, arrived, strict=True)
    ]
