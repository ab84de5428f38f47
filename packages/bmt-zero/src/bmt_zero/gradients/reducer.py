"""``GradientReducer``: sums the whole gradients of one group over its ranks, while the backward pass goes on.

[Note: where means are divided] After ``init_distributed(gradients="mean")`` sums are divided by the number of ranks that see
different data (not by the group's size: the group may have ranks that see the same data). If the collective can divide, it does. A
float32 sum that is then rounded to a half type, or added to another sum, is divided in that pass, before rounding. A sum in a half
type could overflow, so its terms are divided before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from bmt_core.comm import ReduceOp, Work
from bmt_core.comm.call_check import call_purpose
from bmt_core.errors import BmtError
from bmt_core.modules.block_use import at_end_of_scheduled_step, is_in_scheduled_step
from bmt_core.params.gradient_comparison import GradientComparison
from bmt_core.params.gradient_sum import GradientSum, GradientWitness
from bmt_core.params.owner import ReductionWatcher
from bmt_core.params.shard import summation_dtype
from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_core.torch_internals import backward_pass, named_in_trace
from bmt_zero.gradients.full_gradients import FullGradients
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.sharding.parameter_group import ParameterGroup


class Division(NamedTuple):
    """How a sum over ranks is divided: see [Note: where means are divided].

    Gradients are multiplied by ``before`` and reduced by ``op``; the result is multiplied by ``after``.
    """

    before: float = 1.0
    op: ReduceOp = "sum"
    after: float = 1.0


class GradientReducer:
    """Reduces whole gradients of ``group``, and leaves this rank's part of the sum over the ranks in ``.grad``.

    Reductions run in ``lane``. ``in_flight`` keeps the whole gradients alive until the lane has read them.
    """

    def __init__(
        self, group: ParameterGroup, *, name: str, reduce_dtype: ReduceDtype, lane: Lane, in_flight: ReductionsInFlight
    ) -> None:
        self.sum = GradientSum(group.parameters, group.pieces, group.indices)
        self.watcher: ReductionWatcher | None = None
        self._group = group
        self._comparison = GradientComparison()
        self._name = name
        self._purpose = ""
        self._reduce_dtype = reduce_dtype
        self._lane = lane
        self._ranks = lane.group(group.ranks)
        self._divisor = current().gradient_divisor
        self.in_flight = in_flight
        self.is_unwatched = False
        """Whether the current pass leaves gradients held back or postponed, so that :meth:`end_pass` must be called."""
        self._held_back: torch.Tensor | None = None
        self._awaited: set[object] = set()  # one handle for each call whose gradients are postponed
        self._needed: Sequence[bool] = []  # which gradients the last pass held back or postponed
        self._witness: GradientWitness | None = None  # tells whether .grad was changed since that pass
        self._is_adding = False  # layers add to the held-back sum in place: if the pass fails meanwhile, it is dropped
        self._placeholders: list[torch.nn.Parameter] = []  # their .grad is a zero that stands for held-back gradients

    @property
    def held_back_bytes(self) -> int:
        """Bytes that :meth:`hold_back` keeps between micro-batches; 0 if no parameter trains."""
        trains = True in [parameter.requires_grad for parameter in self._group.parameters]
        return self._group.total * summation_dtype(self._group.dtype).itemsize if trains else 0

    def new_full_gradients(self) -> FullGradients:
        """Return memory for the whole gradients of one backward pass, in :attr:`wire_dtype`."""
        self.in_flight.make_room()
        return FullGradients(self._group, self.wire_dtype)

    def adds_products(self, *, reduces: bool) -> bool:
        """Whether layers with half-type weights can add their weight gradients directly to a float32 sum.

        There is such a sum if this pass holds its gradients back (not ``reduces``), or if an earlier pass did.
        """
        return self._group.dtype.itemsize == 2 and (not reduces or self._held_back is not None)

    def room_for_products(self, *, reduces: bool, of_several: bool) -> FullGradients:
        """Return memory for the gradients that :meth:`reduce` or :meth:`hold_back` takes: the float32 sum if layers can add to it.

        ``of_several``: the gradients are those of several backward passes. Other ranks may have held some of these back, and then
        reduce a float32 sum, so this rank must reduce float32 too. With a single rank, half types need no float32 sum.
        """
        self.forget_cleared()
        is_wide = of_several and self._group.ranks.size > 1 and self._group.dtype.itemsize == 2
        if not is_wide and not self.adds_products(reduces=reduces):
            return self.new_full_gradients()
        if reduces and self._held_back is None:
            self.in_flight.make_room()
        self._is_adding = self._held_back is not None
        dtype = summation_dtype(self._group.dtype)
        return FullGradients(self._group, dtype, total=self._held_back, takes_wide=True)

    def forget_cleared(self) -> None:
        """Drop held-back and postponed gradients if the user has cleared ``.grad``, or if the pass that left them failed.

        See the notes in :mod:`bmt_core.params.gradient_sum`.
        """
        self.sum.forget_if_cleared()
        has_ended = backward_pass() == -1 and not is_in_scheduled_step()
        has_failed = self._is_adding or (self.is_unwatched and has_ended)
        if not has_failed and (self._witness is None or self._witness.unchanged()):
            return
        if not has_failed and not self._awaited and self._witness is not None and not self._witness.changed_all():
            self._forget_some(self._witness)
        else:
            self._held_back = self._witness = None
            self._awaited.clear()
            self._placeholders = []
            self.is_unwatched = self._is_adding = False

    def _forget_some(self, witness: GradientWitness) -> None:
        """Drop the held-back gradients of the parameters whose ``.grad`` was cleared, by one of several optimizers."""
        parameters = self._group.parameters
        cleared = [witness.changed(parameter) for parameter in parameters]
        if self._held_back is not None:
            views = self._group.views_of(self._held_back)
            torch._foreach_zero_([view for view, is_cleared in zip(views, cleared, strict=True) if is_cleared])
        self._needed = [need and not is_cleared for need, is_cleared in zip(self._needed, cleared, strict=True)]
        self._placeholders = [p for p in self._placeholders if not witness.changed(p)]
        left = [None if is_cleared else p.grad for p, is_cleared in zip(parameters, cleared, strict=True)]
        self._witness = GradientWitness(parameters, left)

    def reduce(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Start to reduce ``full``, the flat whole gradients, plus those held back, into :attr:`sum`. Collective."""
        self._is_adding = False
        self.forget_cleared()
        needed = self._or_held_back(needed)
        full = self._with_held_back(full)
        self._comparison.check(self._group.parameters, lambda: self._group.views_of(full))
        reduced = self._output_for(full, stays=self._output_dtype(full) == self._group.dtype and self.sum.is_first)
        division = self._division(full, reduced)
        then = self.sum.take(reduced, needed, division.after)
        if self._ranks.size == 1 and then is None and division.before == 1:
            done = None  # with one rank ``full`` is the sum already
        else:
            self._lane.after(self._lane.here())
            with named_in_trace(f"reduce {self._name}"):
                done = self._lane.run(lambda: self._start(reduced, full, division), then)
            self.in_flight.keep(self._name, full, done)
            self.sum.ready_at(done)
        if self.watcher is not None and self.sum.flat is not None:
            self.watcher(self.sum.flat, self._lane.here() if done is None else done)

    def reduce_now(self, full: torch.Tensor, *, completes: bool) -> torch.Tensor:
        """Reduce ``full`` and return this rank's part; for half types it may be float32. Collective.

        ``completes``: gradients held back are added.
        """
        full = self._with_held_back(full) if completes else full
        self._comparison.check(self._group.parameters, lambda: self._group.views_of(full))
        reduced = self._output_for(full, stays=True)
        division = self._division(full, reduced)
        self._lane.after(self._lane.here())
        self._lane.run(lambda: self._start(reduced, full, division)).wait()
        return reduced if division.after == 1 else reduced.mul_(division.after)

    def hold_back(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Keep ``full``, flat whole gradients, for a later :meth:`reduce`, summed on this rank in float32."""
        self._is_adding = False
        are_added = full is self._held_back  # layers have added to the held-back sum itself
        if not are_added:
            self.forget_cleared()
        self._needed, self.is_unwatched = self._or_held_back(needed), True
        if self._held_back is None:
            self._held_back = full.to(summation_dtype(self._group.dtype))
        elif not are_added:
            self._held_back += full

    def expect(self, needed: Sequence[bool]) -> object:
        """Note that the current pass postpones gradients. Return a handle for :meth:`receive` or :meth:`forget`."""
        self.forget_cleared()
        self._needed, self.is_unwatched = self._or_held_back(needed), True
        awaited = object()
        self._awaited.add(awaited)
        return awaited

    def receive(self, awaited: object) -> None:
        """Note that the postponed gradients are about to be computed. Raises :class:`BmtError` if they were dropped."""
        self.forget_cleared()
        if awaited not in self._awaited:
            raise BmtError(
                f"Weight gradients of {self._name} were postponed, and compute() came after .grad was cleared or changed, or after"
                " a backward pass that failed, which drops them. Call compute() before zero_grad() and before .grad is changed."
            )
        self._awaited.remove(awaited)

    def forget(self, awaited: object) -> None:
        """Note that the pass that postponed gradients failed."""
        self._awaited.discard(awaited)
        # Gradients that an earlier pass of the same step holds back must still be watched when the step ends.
        self.is_unwatched = self._held_back is not None and self._witness is None

    def end_pass(self) -> None:
        """From the end of the pass on, watch whether the user clears ``.grad``, which drops held-back and postponed gradients.

        Inside :func:`scheduled_step` nobody clears gradients, so this is done when the step ends. A ``.grad`` that is None is set
        to zeros, so that ``zero_grad`` has something to clear.
        """
        if not self.is_unwatched or at_end_of_scheduled_step(self.end_pass):
            return
        self.is_unwatched = False
        parameters = self._group.parameters
        missing = [p for p, wanted in zip(parameters, self._needed, strict=True) if wanted and p.grad is None]
        if missing:
            zeros = dict(zip(parameters, self.sum.views(torch.zeros_like(self._group.shard)), strict=True))
            for parameter in missing:  # .data has a version of its own, so that each can be cleared by itself
                parameter.grad = zeros[parameter].data
            self._placeholders += missing
        self._witness = GradientWitness(parameters, [parameter.grad for parameter in parameters])

    def reduce_held_back(self) -> None:
        """Reduce the gradients held back that no later backward pass has reduced. Collective."""
        self.forget_cleared()
        if self._awaited:
            raise BmtError(
                f"Weight gradients of {self._name} were postponed in {len(self._awaited)} calls and are not computed, so .grad is"
                " not complete. Call compute() of what postpone_weight_gradients() gave before the optimizer's step, or zero_grad()"
                " to drop them."
            )
        if self._held_back is not None:
            nothing = torch.zeros(self._group.total, dtype=self.wire_dtype, device=self._group.device)
            self.reduce(nothing, [parameter.requires_grad for parameter in self._group.parameters])
            self.in_flight.wait()
            self.sum.finish()

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the flat whole gradients that are reduced."""
        dtype = self._group.dtype
        if self._group.ranks.size == 1 or self._reduce_dtype == "param":
            return dtype
        # No all-reduce can send a half type and sum in float32.
        is_wide = self._group.is_replicated or self._reduce_dtype == "fp32"
        return summation_dtype(dtype) if is_wide else dtype

    def _or_held_back(self, needed: Sequence[bool]) -> Sequence[bool]:
        """Return ``needed`` plus the parameters with held-back gradients: one that was frozen since then keeps its gradient."""
        if self._held_back is None:
            return needed
        return [now or before for now, before in zip(needed, self._needed, strict=True)]

    def _with_held_back(self, full: torch.Tensor) -> torch.Tensor:
        self._is_adding = False
        self.forget_cleared()
        held, self._held_back, self._witness = self._held_back, None, None
        self.is_unwatched = bool(self._awaited)
        for parameter in self._placeholders:
            parameter.grad = None  # a placeholder, not a gradient to add to
        self._placeholders = []
        if held is None or held is full:
            return full
        held += full
        return held

    def _output_for(self, full: torch.Tensor, *, stays: bool) -> torch.Tensor:
        """Return the tensor to reduce into. It is allocated for the computation if it ``stays`` as ``.grad``, else for the lane."""
        if self._group.is_replicated:
            return full
        with nullcontext() if stays else self._lane.memory():
            return torch.empty_like(self._group.shard, dtype=self._output_dtype(full))

    def _output_dtype(self, full: torch.Tensor) -> torch.dtype:
        is_same = self._group.is_replicated or self._reduce_dtype == "param"
        return full.dtype if is_same else summation_dtype(full.dtype)

    def _division(self, full: torch.Tensor, reduced: torch.Tensor) -> Division:
        if self._divisor == 1:
            return Division()
        if reduced.dtype.itemsize < 4:
            return Division(before=1 / self._divisor)
        if reduced.dtype == full.dtype and self._divisor == self._ranks.size:
            return Division(op="avg")
        return Division(after=1 / self._divisor)

    def _start(self, reduced: torch.Tensor, full: torch.Tensor, division: Division) -> Work:
        if division.before != 1:
            full *= division.before
        if not self._purpose:
            self._purpose = f"for gradients of {self._group.labels}"
        with call_purpose(self._purpose):
            if self._group.is_replicated:
                return self._ranks.all_reduce(full, division.op)
            return self._ranks.reduce_scatter(reduced, full, division.op)
