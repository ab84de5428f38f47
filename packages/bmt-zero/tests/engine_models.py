"""A virtual clock for collectives and computation, and delays of them on GPUs, for the tests of the
engine's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bmt_core.comm import Work
from bmt_core.run import lanes
from bmt_core.run.runtime import current
from bmt_zero import Block, TransformerBlockList
from bmt_zero.block_call import BlockCall


class Mark:
    """A point in virtual time."""

    def __init__(self, clock: Clock, time: float) -> None:
        self.clock, self.time = clock, time

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.time)


class Clock:
    """The computation's virtual time."""

    now = 0.0


class VirtualLane(lanes.Lane):
    """A lane whose collectives take ``cost`` each, in virtual time."""

    def __init__(self, name: str, clock: Clock, cost: float) -> None:
        super().__init__(name, current().topology)
        self.clock, self.cost, self.free_at = clock, cost, 0.0

    def here(self) -> lanes.Mark:
        return Mark(self.clock, self.clock.now)

    def after(self, mark: lanes.Mark) -> None:
        assert isinstance(mark, Mark)
        self.free_at = max(self.free_at, mark.time)

    def follow(self) -> None:
        self.after(self.here())

    def run(self, start: Callable[[], Work], then: Callable[[], None] | None = None) -> lanes.Mark:
        start().wait()
        if then is not None:
            then()
        self.free_at += self.cost
        return Mark(self.clock, self.free_at)

    def run_after(
        self,
        mark: lanes.Mark,
        start: Callable[[], Work],
        then: Callable[[], None] | None = None,
    ) -> lanes.Mark:
        self.after(mark)
        return self.run(start, then)


class Tick(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        clock: Clock,
        forward: float,
        backward: float,
    ) -> Any:
        clock.now += forward
        ctx.clock, ctx.cost = clock, backward
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.now += ctx.cost
        return grads[0], torch.zeros(4), None, None, None


class Ticking(nn.Module):
    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.clock, self.costs = clock, (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Tick.apply(x, self.weight, self.clock, *self.costs)  # type: ignore[no-untyped-call]
        return y


class TicksAroundLinear(nn.Sequential):
    """Half of the time is spent before the linear layer, which writes its gradient itself, and half
    after it.
    """

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        halves = [Ticking(clock, forward / 2, backward / 2) for _ in range(2)]
        super().__init__(halves[0], nn.Linear(4, 4), halves[1])


def virtual_step(
    blocks: int,
    forward: float,
    backward: float,
    gather: float,
    reduce: float,
    in_list: bool,
    kind: Callable[[Clock, float, float], nn.Module] = Ticking,
    over_replicas: float = 0.0,
) -> list[tuple[float, float]]:
    """The virtual lengths of forward and backward in each of three steps. ``over_replicas`` is
    what the sum over the replicas of a part takes.
    """
    clock = Clock()
    current().lanes.gather = VirtualLane("gather", clock, gather)
    current().lanes.reduce = VirtualLane("reduce", clock, reduce)
    current().lanes._named["replicas"] = VirtualLane("replicas", clock, over_replicas)
    modules = [Block(kind(clock, forward, backward), False, 3) for _ in range(blocks)]
    call: Any = TransformerBlockList(modules) if in_list else nn.Sequential(*modules)
    lengths = []
    for _ in range(3):
        began = clock.now
        loss = call(torch.ones(2, 4)).sum()
        between = clock.now
        loss.backward()
        lengths.append((between - began, clock.now - between))
        with torch.no_grad():
            torch._foreach_mul_(list(call.parameters()), 1.0)
    return lengths


@contextmanager
def delayed(cycles: int) -> Iterator[None]:
    """Delay every collective, before and after, and the computation before every use of
    gathered parameters.
    """
    run, acquire = lanes.CudaLane.run, BlockCall._acquire

    def slow_run(
        self: Any, start: Callable[[], Work], then: Callable[[], None] | None = None
    ) -> lanes.Mark:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
        mark = run(self, start, then)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            return self.stream.record_event() if cycles % 2 else mark

    def slow_acquire(self: Any, **kwargs: Any) -> None:
        acquire(self, **kwargs)
        torch.cuda._sleep(cycles)

    lanes.CudaLane.run, BlockCall._acquire = slow_run, slow_acquire  # type: ignore[method-assign]
    try:
        yield
    finally:
        lanes.CudaLane.run, BlockCall._acquire = run, acquire  # type: ignore[method-assign]
