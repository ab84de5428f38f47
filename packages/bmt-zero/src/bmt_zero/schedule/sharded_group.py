"""``ShardedGroup``: one group of a Block's parameters with everything that gathers and reduces it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.comm import Group
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.gradients.full_gradients import FullGradients
from bmt_zero.gradients.reductions_in_flight import ReductionsInFlight
from bmt_zero.schedule.group_owner import GroupOwner
from bmt_zero.sharding.parameter_group import ParameterGroup


class ShardedGroup(GroupOwner):
    """What a Block gathers by one all-gather and reduces by one reduce-scatter.

    ``group`` says where the parameters lie. ``level`` is the ZeRO level.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        level: int,
        ranks: Group,
        reduce_dtype: ReduceDtype,
        name: str,
        in_flight: ReductionsInFlight,
    ) -> None:
        self.level = level
        self.group = ParameterGroup(parameters, ranks=ranks, replicated=level == 0, device=current().device)
        self._leaves: list[torch.Tensor] = []
        super().__init__(self.group, reduce_dtype=reduce_dtype, name=name, in_flight=in_flight)

    def bytes_to_gather(self, own_holds: int) -> int:
        """How much memory a gather takes that nobody has taken yet, apart from the caller, who holds it ``own_holds`` times."""
        is_there = self.buffer.holders > own_holds or (self.level < 2 and self.buffer.is_available)
        return 0 if is_there or self.group.is_replicated else self.group.full_bytes

    def wait(self) -> None:
        """Let the computation wait for the whole parameters."""
        if self.group.is_replicated:
            self.data.updates.wait()
            self.data.updates.clear()
        self.buffer.wait()
        self.data.updates.forget_awaited()

    def release(self) -> None:
        """Undo one hold of the buffer; the last one frees it at levels 2 and 3."""
        self.buffer.release()
        self.free_unless_held()

    def free_unless_held(self) -> None:
        """Free the buffer at levels 2 and 3 when nobody holds it."""
        if self.level >= 2:
            self.buffer.free_unless_held()

    def views(self) -> list[torch.Tensor]:
        """Return the whole parameters, in their shapes: views of the buffer, fresh objects at each call."""
        return self.group.views_of(self.buffer.tensor)

    def leaves(self, trains: Sequence[bool]) -> list[torch.Tensor]:
        """Return the whole parameters as leaves of the autograd graph, those that require gradients as ``trains`` says.

        They are made once, and again when ``trains`` is another.
        """
        if [leaf.requires_grad for leaf in self._leaves] != trains:
            self._leaves = [
                view.detach().requires_grad_(train) for view, train in zip(self.views(), trains, strict=True)
            ]
        return self._leaves

    def new_full_gradients(self) -> FullGradients:
        """Return room for the whole gradients of one backward pass, in the dtype of the wire."""
        self._in_flight.make_room()
        return FullGradients(self.group, self.reducer.wire_dtype)

    def reduce(self, full: torch.Tensor, needed: Sequence[bool]) -> None:
        """See :meth:`GradientReducer.reduce`. Collective."""
        self._expect_update()
        self.reducer.reduce(full, needed)

    def reduce_now(self, full: torch.Tensor) -> torch.Tensor:
        """See :meth:`GradientReducer.reduce_now`. Collective."""
        self._expect_update()
        return self.reducer.reduce_now(full)

    def _expect_update(self) -> None:
        # What follows a reduction is an update, by whomever; that it was reduced is known to every rank alike.
        if self.level == 1:
            self.buffer.mark_outdated()
