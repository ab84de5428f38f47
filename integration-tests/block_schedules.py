"""Schedules that drive Blocks by ``set_use``, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from bmt_params import BlockUse, PostponedGradients, postpone_weight_gradients

MICRO_BATCHES = 4

# Forward or backward, of which micro-batch; the use is read at the forward.
Action = tuple[str, int, BlockUse]


def gpipe() -> Iterator[Action]:
    """All forwards, then all backwards: parameters are gathered once for each of the two."""
    last = MICRO_BATCHES - 1
    for i in range(MICRO_BATCHES):
        use = BlockUse(
            first_forward=i == 0,
            last_forward=i == last,
            first_backward=i == 0,
            last_backward=i == last,
        )
        yield "forward", i, use
    for i in range(MICRO_BATCHES):
        yield "backward", i, BlockUse()


def one_forward_one_backward() -> Iterator[Action]:
    """Backward of a micro-batch right after the forward of the next: parameters stay from the first
    use to the last.
    """
    last = MICRO_BATCHES - 1
    for i in range(MICRO_BATCHES):
        yield (
            "forward",
            i,
            BlockUse(
                first_forward=i == 0,
                last_forward=False,
                first_backward=False,
                last_backward=i == last,
            ),
        )
        if i > 0:
            yield "backward", i - 1, BlockUse()
    yield "backward", last, BlockUse()


def accumulation() -> Iterator[Action]:
    """One micro-batch after the other; gradients are reduced with the last one."""
    for i in range(MICRO_BATCHES):
        yield "forward", i, BlockUse(last_backward=i == MICRO_BATCHES - 1)
        yield "backward", i, BlockUse()


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "accumulation": accumulation}


def run_step(
    schedule: str,
    blocks: Iterable[nn.Module],
    loss_of: Callable[[int], torch.Tensor],
    delay: int | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward of all micro-batches, whose losses ``loss_of`` computes, and
    return these.

    With ``delay`` weight gradients are postponed: those of a micro-batch are computed after the
    backward pass of as many more.
    """
    graphs: dict[int, torch.Tensor] = {}
    postponed: list[PostponedGradients] = []
    losses = []
    for what, micro, use in SCHEDULES[schedule]():
        if what == "forward":
            for block in blocks:
                block.set_use(use)  # type: ignore[operator]
            graphs[micro] = loss_of(micro)
            losses.append(graphs[micro].detach())
        elif delay is None:
            graphs.pop(micro).backward()
        else:
            with postpone_weight_gradients() as left:
                graphs.pop(micro).backward()
            postponed.append(left)
            if len(postponed) > delay:
                postponed.pop(0).compute()
    for left in postponed:
        left.compute()
    return losses
