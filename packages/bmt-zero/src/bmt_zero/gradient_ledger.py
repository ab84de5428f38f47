"""``GradientLedger``: where the gradients of one parameter group are, from the backward pass to the
optimizer's step.

[Note: states of gradients] A backward pass makes whole gradients. Their sum over the ranks is
reduced, and this rank's part of it becomes ``.grad``. On the way they are in these states, of which
several may hold at once:

=========  =========================================  ===========================================
state      what the ledger has                        ``.grad``
=========  =========================================  ===========================================
EMPTY      nothing                                    None, or what somebody else has set
HELD_BACK  the sum of this rank's whole gradients,    from the pass's end on zeros where it would
           in float32                                 be None
POSTPONED  a ticket per call that kept its products   the same
REDUCING   reductions in the lane, of this pass       None: it is set when the pass ends
READY      the reduced sum                            views of this sum
=========  =========================================  ===========================================

``tests/test_gradient_ledger.py`` has the transitions as a table. A cleared ``.grad`` and a failed
pass are noticed in one place, :meth:`notice_cleared`.

[Note: where means are divided] After ``init_distributed(gradients="mean")`` sums are divided by the
number of ranks that see different data (not by the group's size: the group may have ranks that see
the same data). If the collective can divide, it does. A float32 sum that is then rounded to a half
type, or added to another sum, is divided in that pass, before rounding. A sum in a half type could
overflow, so its terms are divided before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Flag, auto
from functools import partial
from typing import NamedTuple

import torch

from bmt_core.comm import Group, ReduceOp, Work
from bmt_core.comm.annotate import annotate
from bmt_core.errors import BmtError
from bmt_core.run.lanes import Lane, Mark
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_core.torch_internals import backward_pass, memory_states
from bmt_params.gradient_sum import GradientSum, GradientWitness
from bmt_params.guards.gradient_comparison import GradientComparison
from bmt_params.modules.block_use import at_end_of_scheduled_step, is_in_scheduled_step
from bmt_params.owner import ReductionWatcher
from bmt_params.shard import summation_dtype
from bmt_zero.flat_parameters import FlatParameters


class GradientState(Flag):
    """See [Note: states of gradients]."""

    EMPTY = 0
    HELD_BACK = auto()
    POSTPONED = auto()
    REDUCING = auto()
    READY = auto()


class Division(NamedTuple):
    """How a sum over ranks is divided: see [Note: where means are divided].

    Gradients are multiplied by ``before`` and reduced by ``op``; the result is multiplied
    by ``after``.
    """

    before: float = 1.0
    op: ReduceOp = "sum"
    after: float = 1.0


class GradientLedger:
    """The gradients of ``flat``, in the states of [Note: states of gradients].

    Reductions run in ``lane``. ``in_flight`` keeps the whole gradients alive until the lane has
    read them.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        name: str,
        reduce_dtype: ReduceDtype,
        lane: Lane,
        in_flight: ReductionsInFlight,
    ) -> None:
        self.sum = GradientSum(flat.parameters, flat.pieces, flat.indices)
        self.watcher: ReductionWatcher | None = None
        self.in_flight = in_flight
        self._flat = flat
        self._comparison = GradientComparison() if current().topology.has_same_data else None
        self._name = name
        self._purpose = ""
        self._reduce_dtype = reduce_dtype
        self._lane = lane
        self._secondary = flat.secondary
        inside, replicas = flat.process_group, flat.replicas
        if flat.secondary is not None:
            inside, replicas = flat.secondary.inside, flat.secondary.across
        # The lane's own communicators: on shared ones it would queue behind gathers.
        self._process_group = lane.group(inside)
        # After the sum over the process group, a sum over the ranks with the same part, or with the
        # others of a secondary shard.
        # It has a lane of its own, so that it runs beside the next reduction.
        self._replica_lane = current().lanes.named("replicas")
        self._replicas = None if replicas is None else self._replica_lane.group(replicas)
        self._is_alone = flat.process_group.size == 1 and replicas is None
        self._sum_dtype = summation_dtype(flat.compute_dtype)
        # No all-reduce can send a half type and sum in float32.
        is_wide = not self._is_alone and (
            reduce_dtype == "fp32" or (flat.is_replicated and reduce_dtype != "param")
        )
        self.wire_dtype = self._sum_dtype if is_wide else flat.compute_dtype
        """The dtype of the flat whole gradients that are reduced."""
        self._divisor = current().gradient_divisor
        self._held_back: torch.Tensor | None = None
        self._tickets: set[object] = set()
        self._needed: Sequence[bool] = []  # which gradients are held back or postponed
        # Parameters whose .grad was set to a zero that stands for those gradients, with its memory
        # and what it was like.
        self._placeholders: list[tuple[torch.nn.Parameter, torch.UntypedStorage, object]] = []
        # What the pass under way has left: tickets, and this object for held-back gradients.
        # Watched from its end.
        self._left_by_pass: set[object] = set()

    @property
    def state(self) -> GradientState:
        """The states that hold now. A cleared ``.grad`` counts once it was noticed."""
        sums = GradientState.REDUCING if self.sum.is_adding else GradientState.READY
        return (
            (GradientState.EMPTY if self._held_back is None else GradientState.HELD_BACK)
            | (GradientState.POSTPONED if self._tickets else GradientState.EMPTY)
            | (GradientState.EMPTY if self.sum.flat is None else sums)
        )

    @property
    def held_back_bytes(self) -> int:
        """Bytes that :meth:`hold_back` keeps between micro-batches; 0 if no parameter trains."""
        trains = True in [parameter.requires_grad for parameter in self._flat.parameters]
        return self._flat.total * self._sum_dtype.itemsize if trains else 0

    def new_flat(self) -> torch.Tensor:
        """Return a flat tensor for the whole gradients of one call's backward, in
        :attr:`wire_dtype`; uninitialised.
        """
        self.in_flight.make_room()
        return torch.empty(self._flat.total, dtype=self.wire_dtype, device=self._flat.device)

    def adds_products(self, *, reduces: bool) -> bool:
        """Whether layers with half-type weights can add their weight gradients directly to a
        float32 sum.

        There is such a sum if this pass holds its gradients back (not ``reduces``), or if an
        earlier pass did.
        """
        return self._flat.compute_dtype.itemsize == 2 and (
            not reduces or self._held_back is not None
        )

    def sum_for_products(
        self, *, reduces: bool, of_several: bool
    ) -> tuple[torch.Tensor, bool] | None:
        """Return a float32 tensor for layers to add to, for :meth:`reduce` or :meth:`hold_back`,
        and whether it has values already.

        None: no layer adds to a float32 sum, so the gradients take :meth:`new_flat`.

        ``of_several``: the gradients are those of several backward passes. Other ranks may have
        held some of these back, and then reduce a float32 sum, so this rank must reduce float32
        too. A single rank needs none for half types.
        """
        self.notice_cleared()
        is_half = self._flat.compute_dtype.itemsize == 2
        is_wide = of_several and not self._is_alone and is_half
        if not is_wide and not self.adds_products(reduces=reduces):
            return None
        if reduces and self._held_back is None:
            self.in_flight.make_room()
        if self._held_back is not None:
            return self._held_back, True
        return torch.empty(self._flat.total, dtype=self._sum_dtype, device=self._flat.device), False

    def reduce(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Start to reduce ``full``, flat whole gradients, plus those held back. Collective.
        :meth:`end_pass` completes it.
        """
        # First, because zero_grad() between the micro-batches drops what they have left.
        self.notice_cleared()
        if self._held_back is not None:  # a parameter that was frozen since then keeps its gradient
            needed = [now or before for now, before in zip(needed, self._needed, strict=True)]
        full = self._with_held_back(full)
        if self._comparison is not None:
            self._comparison.check(self._flat.parameters, lambda: self._flat.views_of(full))
        dtype = self._output_dtype(full)
        stays = dtype == self._flat.dtype and self.sum.is_first
        # What two lanes use is kept until the computation has waited for both.
        reduced = self._output_for(full, dtype, stays=stays or self._replicas is not None)
        division = self._division(full, reduced)
        then = self.sum.add(reduced, needed, division.after)
        if self._is_alone and then is None and division.before == 1:
            done = None  # with one rank ``full`` is the sum already: nothing is in flight
        else:
            summed, done, part = self._run(reduced, full, division, then)
            if part is not reduced:
                self.in_flight.keep(self._name, part, done)
            self.in_flight.keep(self._name, full, summed)
            if summed is not done:
                self.in_flight.keep_until_end(reduced, done)
            self.sum.ready_at(done)
        if self.watcher is not None and self.sum.flat is not None:
            self.watcher(self.sum.flat, self._lane.here() if done is None else done)

    def reduce_now(self, full: torch.Tensor, *, completes: bool) -> torch.Tensor:
        """Reduce ``full`` and return this rank's part; for half types it may be float32.
        Collective.

        ``completes``: gradients held back are added.
        """
        if completes:
            self.notice_cleared()
            full = self._with_held_back(full)
        if self._comparison is not None:
            self._comparison.check(self._flat.parameters, lambda: self._flat.views_of(full))
        reduced = self._output_for(full, self._output_dtype(full), stays=True)
        division = self._division(full, reduced)
        _, done, _ = self._run(reduced, full, division, None)
        done.wait()
        return reduced if division.after == 1 else reduced.mul_(division.after)

    def hold_back(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """Keep ``full``, flat whole gradients, for a later :meth:`reduce`, summed on this rank
        in float32.
        """
        self._leave(needed)
        if self._held_back is None:
            self._held_back = full.to(self._sum_dtype)
        elif full is not self._held_back:  # else layers have added to the sum itself
            self._held_back += full
        self._left_by_pass.add(self)

    def postpone(self, needed: Sequence[bool]) -> object:
        """Note that a call postpones gradients. Return a ticket for :meth:`resume`
        or :meth:`forget`.
        """
        self._leave(needed)
        ticket = object()
        self._tickets.add(ticket)
        self._left_by_pass.add(ticket)
        return ticket

    def resume(self, ticket: object) -> None:
        """Note that postponed gradients are about to be computed. Raises :class:`BmtError` if they
        were dropped.
        """
        self.notice_cleared()
        if ticket not in self._tickets:
            raise BmtError(
                f"Weight gradients of {self._name} were postponed, and compute() came after .grad"
                " was cleared or changed, or after a backward pass that failed, which drops them."
                " Call compute() before zero_grad() and before .grad is changed."
            )
        self.forget(ticket)

    def forget(self, ticket: object) -> None:
        """Note that postponed gradients are about to be computed, or that their pass has failed."""
        self._tickets.discard(ticket)
        self._left_by_pass.discard(ticket)

    def drop(self) -> None:
        """Drop what is held back or postponed: a gradient could not be computed, perhaps after a
        part of it was added.
        """
        self._held_back = None
        self._tickets.clear()
        self._placeholders = []
        self._left_by_pass.clear()

    def end_pass(self) -> None:
        """Set ``.grad`` to what was reduced, and watch it from now on, because a cleared ``.grad``
        drops what was left.
        """
        self.sum.finish()
        self._watch()

    def expect_gradient(self) -> None:
        """See :meth:`ParameterOwner.expect_gradient`: ``.grad`` may change, and drops nothing."""
        self.notice_cleared()
        self._leave_what_is_left()

    def gradient_is_set(self) -> None:
        """See :meth:`ParameterOwner.gradient_is_set`: watch ``.grad`` as it is now."""
        self._leave_what_is_left()
        self.end_pass()

    def notice_cleared(self) -> None:
        """Drop what ``.grad`` no longer stands for, or what a failed pass has left. See
        [Note: gradient accumulation] in :mod:`bmt_params.gradient_sum`.
        """
        witness = self.sum.witness
        self.sum.forget_if_cleared()
        if self._held_back is None and not self._tickets:
            self._left_by_pass.clear()
            return
        if self._left_by_pass:
            # No end_pass() watches them yet: the pass runs, or a schedule does, or it failed.
            if backward_pass() == -1 and not is_in_scheduled_step():
                self.drop()
        elif (
            # A ticket stands for gradients of all parameters, so it is valid for all or for none.
            witness is None or (self._tickets and not witness.unchanged()) or witness.changed_all()
        ):
            self.drop()
        elif not witness.unchanged():
            self._drop_some(witness)

    def reduce_held_back(self) -> None:
        """Reduce the gradients held back that no later backward pass has reduced. Collective."""
        self.notice_cleared()
        # Somebody is about to read the gradients: a step, or clipping.
        if self._tickets:
            raise BmtError(
                f"Weight gradients of {self._name} were postponed in {len(self._tickets)} calls and"
                " are not computed, so .grad is not complete. Call compute() of what"
                " postpone_weight_gradients() gave before the optimizer's step, or zero_grad() to"
                " drop them."
            )
        if self._held_back is not None:
            # The whole sum is in what was held back, and a reduction adds that to what it is given.
            nothing = torch.zeros(self._flat.total, dtype=self.wire_dtype, device=self._flat.device)
            self.reduce(nothing, [parameter.requires_grad for parameter in self._flat.parameters])
            self.in_flight.wait()
            self.sum.finish()

    def _leave(self, needed: Sequence[bool]) -> None:
        """Note that the pass under way leaves gradients that are not reduced, those that
        are ``needed``.
        """
        self.notice_cleared()
        if self._held_back is not None:
            needed = [now or before for now, before in zip(needed, self._needed, strict=True)]
        self._needed = needed

    def _leave_what_is_left(self) -> None:
        """Let the pass under way leave what earlier ones have left."""
        if self._held_back is not None or self._tickets:
            self._left_by_pass.add(self)

    def _watch(self) -> None:
        """Watch ``.grad`` from now on if the pass has left gradients. None becomes zeros, for
        ``zero_grad`` to clear.

        Inside :func:`scheduled_step` nobody clears gradients, so they are watched when the
        step ends.
        """
        if not self._left_by_pass or at_end_of_scheduled_step(self._watch):
            return
        self._left_by_pass.clear()
        parameters = self._flat.parameters
        missing = [
            p for p, need in zip(parameters, self._needed, strict=True) if need and p.grad is None
        ]
        if missing:
            zeros = dict(
                zip(parameters, self.sum.views(torch.zeros_like(self._flat.shard)), strict=True)
            )
            # .data has a version of its own, so that each can be cleared by itself.
            for parameter in missing:
                zero = parameter.grad = zeros[parameter].data
                self._placeholders.append(
                    (parameter, zero.untyped_storage(), memory_states([zero]))
                )
        self.sum.watch([parameter.grad for parameter in parameters])

    def _drop_some(self, witness: GradientWitness) -> None:
        """Drop the held-back gradients of the parameters whose ``.grad`` was cleared, by one of
        several optimizers.
        """
        parameters = self._flat.parameters
        cleared = [witness.changed(parameter) for parameter in parameters]
        if self._held_back is not None:
            views = self._flat.views_of(self._held_back)
            torch._foreach_zero_(
                [view for view, is_cleared in zip(views, cleared, strict=True) if is_cleared]
            )
        self._needed = [
            need and not is_cleared for need, is_cleared in zip(self._needed, cleared, strict=True)
        ]
        self.sum.watch(
            [
                None if is_cleared else p.grad
                for p, is_cleared in zip(parameters, cleared, strict=True)
            ]
        )

    def _with_held_back(self, full: torch.Tensor) -> torch.Tensor:
        held, self._held_back = self._held_back, None
        # The pass sets .grad anew, so what stays postponed is watched anew from its end.
        self._left_by_pass = set(self._tickets)
        for parameter, _, state in self._placeholders:
            # Still the zero, to which nobody has added.
            if memory_states([parameter.grad]) == state:
                parameter.grad = None
        self._placeholders = []
        if held is None or held is full:
            return full
        held += full
        return held

    def _output_for(self, full: torch.Tensor, dtype: torch.dtype, *, stays: bool) -> torch.Tensor:
        """Return the tensor to reduce into. It is allocated for the computation if it ``stays`` as
        ``.grad``, else for the lane.
        """
        if self._flat.is_replicated:
            return full
        with nullcontext() if stays else self._lane.memory():
            return torch.empty_like(self._flat.shard, dtype=dtype)

    def _output_dtype(self, full: torch.Tensor) -> torch.dtype:
        is_same = self._flat.is_replicated or self._reduce_dtype == "param"
        return full.dtype if is_same else self._sum_dtype

    def _division(self, full: torch.Tensor, reduced: torch.Tensor) -> Division:
        if self._divisor == 1:
            return Division()
        if reduced.dtype.itemsize < 4:
            return Division(before=1 / self._divisor)
        ranks = self._process_group.size * (1 if self._replicas is None else self._replicas.size)
        if reduced.dtype == full.dtype and self._divisor == ranks:
            return Division(op="avg")
        return Division(after=1 / self._divisor)

    def _run(
        self,
        reduced: torch.Tensor,
        full: torch.Tensor,
        division: Division,
        then: Callable[[], None] | None,
    ) -> tuple[Mark, Mark, torch.Tensor]:
        """Start the collectives, and ``then`` after them. Return when ``full`` is no longer read,
        when all is done, and what the first collective writes, which must live until then.
        """
        part = reduced
        if self._secondary is not None:
            part = reduced.new_empty(reduced.numel() * self._secondary.across.size)
        # After all allocations, because torch's deterministic mode fills what is allocated.
        self._lane.follow()
        if self._replicas is None:
            done = self._lane.run(partial(self._start, reduced, full, division), then)
            return done, done, reduced
        summed = self._lane.run(partial(self._start, part, full, division))
        over_replicas = partial(self._sum_over, self._replicas, reduced, part, division.op)
        done = self._replica_lane.run_after(summed, over_replicas, then)
        return (done if reduced is full else summed), done, part

    def _sum_over(
        self, replicas: Group, reduced: torch.Tensor, part: torch.Tensor, op: ReduceOp
    ) -> Work:
        with annotate(self._purpose, label=f"reduce {self._name}"):
            if part is reduced:
                return replicas.all_reduce(reduced, op)
            return replicas.reduce_scatter(reduced, part, op)

    def _start(self, reduced: torch.Tensor, full: torch.Tensor, division: Division) -> Work:
        if division.before != 1:  # in the lane, so that backward does not wait for it
            full *= division.before
        if not self._purpose:
            self._purpose = f"for gradients of {self._flat.labels}"
        with annotate(self._purpose, label=f"reduce {self._name}"):
            if self._flat.is_replicated:
                return self._process_group.all_reduce(full, division.op)
            return self._process_group.reduce_scatter(reduced, full, division.op)


class ReductionsInFlight:
    """The run's whole gradients that the lane still reads, of at most one block besides the one
    whose backward runs.

    If none were allowed, the backward of a block would wait for the reduction of the previous
    block. The memory was allocated on the computation's stream, so it is kept until the computation
    has waited for the lane: see
    [Note: buffer lifetime] in :mod:`bmt_core.run.lanes`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor, Mark]] = []
        self._kept_until_end: list[tuple[torch.Tensor, Mark]] = []

    def keep(self, block: str, full: torch.Tensor, done: Mark) -> None:
        """Keep ``full``, which a reduction for ``block`` reads, until ``done``."""
        self._kept.append((block, full, done))

    def keep_until_end(self, reduced: torch.Tensor, done: Mark) -> None:
        """Keep ``reduced``, this rank's part of a sum, until ``done``, for which only the end of
        the pass waits.
        """
        self._kept_until_end.append((reduced, done))

    def make_room(self) -> None:
        """Wait for the reductions of all blocks but the latest, and free their gradients, before
        new ones are allocated.
        """
        if self._kept:
            # Not all, or backward would stop for every reduction instead of computing beside it.
            self._free_all_but(self._kept[-1][0])

    def wait(self) -> None:
        """Wait for all reductions and free their gradients. Called at the end of the
        backward pass.
        """
        self._free_all_but(None)
        kept, self._kept_until_end = self._kept_until_end, []
        for _, done in kept:
            done.wait()

    def _free_all_but(self, last: str | None) -> None:
        kept, self._kept = self._kept, [entry for entry in self._kept if entry[0] == last]
        for block, _, done in kept:
            if block != last:
                done.wait()
