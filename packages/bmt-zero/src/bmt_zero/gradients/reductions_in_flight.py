"""``ReductionsInFlight``: the reductions of a run that are under way, and small ones that wait to be made together.

[Note: small reductions] A collective costs the host the same time whatever its size, and on a GPU it occupies a part of the device
until all ranks have reached it. So all-reduces of few gradients wait, until there are many of them or the backward pass ends,
and are made as one. All ranks reduce the same gradients in the same order, so they make the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bmt_core.comm import Group, ReduceOp, Work
from bmt_core.comm.call_check import naming
from bmt_core.params.gradient_sum import GradientCopy
from bmt_core.run.lanes import Lane, Mark
from bmt_core.torch_internals import named_in_trace

SMALL = 512 << 10
"""Bytes of the largest all-reduce that waits for others."""
TOGETHER = 4 << 20
"""When this many bytes wait, they are all-reduced."""


class ReductionsInFlight:
    """Whole gradients that the lane still reads, of at most one block besides the one whose backward runs; and those that wait.

    If none were allowed, the backward of a block would wait for the reduction of the previous one. The memory was allocated on the
    computation's stream, so it is kept until the computation has waited for the lane: see [Note: buffer lifetime] in
    :mod:`bmt_core.run.lanes`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, object, Mark]] = []
        self._waiting: dict[object, SmallReductions] = {}

    def keep(self, block: str, memory: object, done: Mark) -> None:
        """Keep ``memory``, which a reduction for ``block`` reads, until ``done``."""
        self._kept.append((block, memory, done))

    def make_room(self) -> None:
        """Wait for the reductions of all blocks but the last, and free their gradients. Called before new ones are allocated."""
        if self._kept:
            self._free_all_but(self._kept[-1][0])

    def wait(self) -> None:
        """Wait for all reductions and free their gradients. Called at the end of the backward pass."""
        self._free_all_but(None)

    def reduce_together(
        self, small: SmallReduction, lane: Lane, ranks: Group, op: ReduceOp, purpose: str
    ) -> SmallReductions:
        """All-reduce ``small`` in ``lane``, with others: see [Note: small reductions].

        Return the mark after which it is done. To wait for the mark starts the all-reduce, if it has not started. ``purpose`` names
        the gradients in errors.
        """
        key = (ranks.ranks, small.full.dtype, op)
        waiting = self._waiting.get(key)
        if waiting is None or waiting.is_started:
            waiting = self._waiting[key] = SmallReductions(self, lane, ranks, op, purpose)
        waiting.add(small)
        return waiting

    def drop_waiting(self) -> None:
        """Forget the all-reduces that wait. Called after a backward pass has failed."""
        for small in self._waiting.values():
            small.drop()
        self._waiting.clear()

    def _free_all_but(self, last: str | None) -> None:
        kept, self._kept = self._kept, [entry for entry in self._kept if entry[0] == last]
        for block, _, done in kept:
            if block != last:
                done.wait()


class SmallReduction(NamedTuple):
    """An all-reduce of ``full`` for ``block``, whose computation is queued.

    ``then`` runs in the lane after it. ``started`` is called with the mark after which both are done.
    """

    block: str
    full: torch.Tensor
    then: Callable[[], None] | None
    started: Callable[[Mark], None]


class SmallReductions:
    """All-reduces of one kind, made together when there are many or when somebody waits for them. A mark of the lane."""

    def __init__(self, in_flight: ReductionsInFlight, lane: Lane, ranks: Group, op: ReduceOp, purpose: str) -> None:
        self._in_flight = in_flight
        self._lane = lane
        self._ranks = ranks
        self._op = op
        self._purpose = purpose
        self._bytes = 0
        self._added: list[SmallReduction] = []
        self._done: Mark | None = None

    @property
    def is_started(self) -> bool:
        """Whether the all-reduce has been started."""
        return self._done is not None

    def add(self, small: SmallReduction) -> None:
        """Add a reduction, and start all of them if they are many."""
        self._lane.after(self._lane.here())
        self._bytes += small.full.nbytes
        self._added.append(small)
        if self._bytes >= TOGETHER:
            self._start()

    def wait(self) -> None:
        """See :meth:`bmt_core.run.lanes.Mark.wait`."""
        if self._done is None and self._added:
            self._start()
        if self._done is not None:
            self._done.wait()

    def drop(self) -> None:
        """Forget the reductions, unless they are started."""
        if self._done is None:
            self._added = []

    def _start(self) -> None:
        added, self._added = self._added, []
        fulls = [small.full for small in added]
        joined: list[torch.Tensor] = []

        def start() -> Work:
            joined.append(torch.cat(fulls) if len(fulls) > 1 else fulls[0])
            return self._ranks.all_reduce(joined[0], self._op)

        def then() -> None:
            follow = [small.then for small in added if small.then is not None]
            if len(fulls) > 1:
                copied = [copy.flat for copy in follow if isinstance(copy, GradientCopy) and copy.factor == 1]
                is_all = len(copied) == len(fulls)  # so they are copied at once to where they belong
                pieces = torch.split(joined.pop(), [full.numel() for full in fulls])
                torch._foreach_copy_(copied if is_all else fulls, pieces)
                if is_all:
                    return
            for function in follow:
                function()

        more = f" and others ({len(fulls)} groups in all)" if len(fulls) > 1 else ""
        with naming(f"{self._purpose}{more}"), named_in_trace(f"reduce small groups: {len(fulls)}"):
            self._done = done = self._lane.run(start, then)
        self._in_flight.keep(added[-1].block, fulls, done)
        for small in added:
            small.started(done)
