"""``Departures``: gradients on their way to the host while the backward pass goes on.

As soon as the reduction of a block's gradients was started, its copy is queued behind it. Whether the copy may be used shows at
the step: the gradients must be the memory that was copied, in the version that was copied. ``OptimManager`` says by what it
multiplies gradients (:meth:`Departures.scaling`), so clipping needs no second copy. Any other change does; a shard to which that
happened stays with copies at the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bmt_core.run.lanes import Mark
from bmt_optim.offload.chunks import HostSchedule
from bmt_optim.offload.copies import Copies, Done
from bmt_optim.offload.host_number import OnHost
from bmt_optim.offload.host_update import Arrival


@dataclass
class _Departure:
    schedule: HostSchedule
    flat: weakref.ref[torch.Tensor]
    version: int
    chunks: list[Done]
    factors: list[torch.Tensor] = field(default_factory=list)

    def is_intact(self) -> bool:
        flat = self.flat()
        return flat is not None and flat._version == self.version and self.schedule.lies_in(flat)


class Departures:
    """What has left since the last step, by schedule."""

    def __init__(self) -> None:
        self._left: dict[HostSchedule, _Departure] = {}
        self._stays: set[HostSchedule] = set()

    def leave(self, schedule: HostSchedule, flat: torch.Tensor, mark: Mark, copies: Copies) -> None:
        """Start copying gradients that are, after ``mark``, in ``flat``, laid out like the parameters' storage."""
        shard = schedule.shard
        if schedule in self._stays or flat.dtype != shard.dtype or flat.numel() < shard.begin + shard.length:
            return
        chunks = schedule.leave_early(flat, mark, copies)
        self._left[schedule] = _Departure(schedule, weakref.ref(flat), flat._version, chunks)

    def arrival(self, schedule: HostSchedule, copies: Copies) -> Arrival:
        """Return when the gradients are there: of what has left if it is the truth still, otherwise of a copy that starts now."""
        departure = self._left.pop(schedule, None)
        if departure is None:
            return Arrival(schedule, schedule.leave(copies))
        if not departure.is_intact():
            self._stays.add(schedule)
            return Arrival(schedule, schedule.leave(copies))
        clip = None
        if departure.factors:
            clip = OnHost(torch.stack([factor.reshape(()) for factor in departure.factors]).prod())
        return Arrival(schedule, departure.chunks, clip)

    @contextmanager
    def scaling(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | None) -> Iterator[None]:
        """Inside, the gradients of ``parameters`` are multiplied by ``factor``; None: by 1, or by 0 if the step is skipped."""
        scaled = set(parameters)
        touched = [d for d in self._left.values() if d.is_intact() and not scaled.isdisjoint(d.schedule.params)]
        for departure in touched:
            if factor is not None and departure.chunks:
                departure.chunks[-1].wait()  # what is being copied must not change
        yield
        for departure in touched:
            if scaled.issuperset(departure.schedule.params):
                flat = departure.flat()
                departure.version = -1 if flat is None else flat._version
                departure.factors += [] if factor is None else [factor]

    def clear(self, schedules: Sequence[HostSchedule] | None = None) -> None:
        """Forget everything: the step has come. With ``schedules``, forget what was learnt about others, too."""
        self._left.clear()
        if schedules is not None:
            self._stays.intersection_update(schedules)
