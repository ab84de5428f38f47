"""Delays on CUDA's streams, and freed memory that is overwritten: what waits for too little
then shows.

A delay lets the other streams run ahead. What they do too early reads what is not there yet; memory
that is freed too early is read still when it has another owner: so all memory that the allocator
would hand out is filled with ones, which are no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from bmt_core.comm import Work
from bmt_core.run import lanes
from bmt_tp.peer_rows import Inbox, PeerRows

Where = Literal["before collectives", "after collectives", "in the computation", "in other streams"]
PLACES: tuple[Where, ...] = (
    "before collectives",
    "after collectives",
    "in the computation",
    "in other streams",
)
# Three milliseconds in which the host comes to the next place where freed memory is overwritten;
# and a tenth of it.
LONG, SHORT = 6_000_000, 600_000
_SMALL = 1 << 20  # the largest request that the allocator serves from its segments for small ones


def overwrite_freed_memory() -> None:
    """Fill, in the order of the current stream, all memory that the next request on it may get."""
    stream = torch.cuda.current_stream()
    sizes: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != stream.device.index or segment["stream"] != stream.cuda_stream:
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if segment["segment_type"] == "small":
                whole, rest = divmod(block["size"], _SMALL)
                sizes += [_SMALL] * whole + [rest] * (rest > 0)
            elif block["size"] > _SMALL:
                sizes.append(block["size"])
    # The largest first: each finds the block of its size.
    kept = [
        torch.empty(size, dtype=torch.uint8, device=stream.device)
        for size in sorted(sizes, reverse=True)
    ]
    for tensor in kept:
        tensor.fill_(255)


@contextmanager
def delayed(where: Where) -> Iterator[Callable[[nn.Module], None]]:
    """Inside, there are delays ``where`` it says, and freed memory is overwritten. Yields what
    tells of the model.

    "in other streams": those that are entered by ``torch.cuda.stream``: of updates beside the
    forward pass, and of copies.
    """

    def step(module: Any, *values: Any) -> None:
        if where == "in the computation":
            torch.cuda._sleep(SHORT)
        overwrite_freed_memory()

    def step_backward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        step(module)
        if output.requires_grad:
            output.register_hook(step)

    def watch(model: nn.Module) -> None:
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(step)
                module.register_forward_hook(step_backward)

    run, enter, send = lanes.CudaLane.run, torch.cuda.StreamContext.__enter__, PeerRows.send

    def slow_run(
        lane: Any, start: Callable[[], Work], then: Callable[[], None] | None = None
    ) -> lanes.Mark:
        def slow_start() -> Work:
            overwrite_freed_memory()
            if where == "before collectives":
                torch.cuda._sleep(LONG)
            work = start()
            work.wait()
            if where == "after collectives":
                torch.cuda._sleep(LONG)
            return work

        return run(lane, slow_start, then)

    def slow_send(peers: PeerRows, inbox: Inbox, *arguments: Any) -> None:
        stream = torch.cuda.current_stream()
        copies = stream if inbox.copies == inbox.computation else peers.lane.stream
        torch.cuda.set_stream(copies)
        overwrite_freed_memory()
        if where == "before collectives":
            torch.cuda._sleep(LONG)
        torch.cuda.set_stream(stream)
        send(peers, inbox, *arguments)
        torch.cuda.set_stream(copies)
        if where == "after collectives":
            torch.cuda._sleep(LONG)
        torch.cuda.set_stream(stream)
        overwrite_freed_memory()

    def slow_enter(context: Any) -> None:
        enter(context)
        if where == "in other streams":
            torch.cuda._sleep(LONG)

    lanes.CudaLane.run, torch.cuda.StreamContext.__enter__ = slow_run, slow_enter  # type: ignore[method-assign]
    PeerRows.send = slow_send  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        lanes.CudaLane.run, torch.cuda.StreamContext.__enter__ = run, enter  # type: ignore[method-assign]
        PeerRows.send = send  # type: ignore[method-assign]
