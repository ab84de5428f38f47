"""Schedules drive Blocks through ``set_use``: gathers and reductions are counted, gradients
compared with plain torch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import bmt_recording
import pytest
import torch
from torch import nn
from zero_models import full_gradient

from bmt_core import rank, world_size
from bmt_params import BlockUse, PostponedGradients, postpone_weight_gradients
from bmt_testing import run_ranks
from bmt_zero import Block
from pairwise import pairwise

STEPS = 3
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
        use = BlockUse(
            first_forward=i == 0, last_forward=False, first_backward=False, last_backward=i == last
        )
        yield "forward", i, use
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


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.norm = nn.Linear(6, 9), nn.LayerNorm(9)
        self.down = nn.Linear(9, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.norm(self.up(x))))
        return out


def batch(step: int, micro: int, of: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + of)
    return torch.randn(2, 6, dtype=torch.float64, generator=generator)


def driven(
    schedule: str, blocks: int, level: int, use_checkpoint: bool, delay: int | None
) -> tuple[list[Counter[str]], list[Any]]:
    model = nn.Sequential(
        *[Block(Layer(number).double(), use_checkpoint, level) for number in range(blocks)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counts, gradients = [], []
    for step in range(STEPS):
        bmt_recording.clear()
        optimizer.zero_grad()
        run_step(
            schedule,
            model,
            lambda micro, s=step: model(batch(s, micro, rank())).square().sum(),
            delay,
        )  # type: ignore[misc]
        optimizer.step()
        counts.append(Counter(call.op for call in bmt_recording.calls))
        gradients.append([full_gradient(p) for p in model.parameters()])
    return counts, [gradients, [value.clone() for value in model.state_dict().values()]]


def plain(blocks: int) -> list[Any]:
    """The same in one process, on the micro-batches of all ranks."""
    model = nn.Sequential(*[Layer(number).double() for number in range(blocks)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            for of in range(world_size()):
                model(batch(step, micro, of)).square().sum().backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return [gradients, list(model.state_dict().values())]


def promised_gathers(schedule: str, level: int) -> int:
    """How often a block is gathered in one step."""
    if level in (0, 1):
        return level  # level 1: once after each optimizer step
    at_level_3 = {"gpipe": 2, "1f1b": 1, "accumulation": 2 * MICRO_BATCHES}[schedule]
    return at_level_3 if level == 3 else {"accumulation": MICRO_BATCHES}.get(schedule, 1)


def saved_gathers(schedule: str, level: int, blocks: int) -> int:
    """How many gathers are saved at most: the last two blocks, which backward needs first, may stay
    until it comes.
    """
    turns = {"gpipe": 1, "1f1b": 0, "accumulation": MICRO_BATCHES}[schedule]
    return min(blocks, 2) * turns if level == 3 else 0


@functools.cache
def expected_gradients(blocks: int) -> Any:
    return run_ranks(plain, 2, blocks)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_gather_and_reduce_as_the_schedule_says(schedule: str) -> None:
    # Postponing the weight gradients changes no number.
    models = ((1, None), (3, None), (2, 2))
    cells = pairwise([schedule], models, range(4), [False, True])
    for _, (blocks, delay), level, use_checkpoint in cells:
        most = blocks * promised_gathers(schedule, level)
        fewest = most - saved_gathers(schedule, level, blocks)
        cell = schedule, blocks, level, use_checkpoint, delay
        for counts, found in run_ranks(driven, 2, *cell, init={"comm_backend": "recording"}):
            torch.testing.assert_close(found, expected_gradients(blocks))
            counts[0]["all_gather"] -= 1  # the first call compares the ranks' first values
            for count in counts:
                assert fewest <= count.pop("all_gather", 0) <= most
                assert count == {"all_reduce" if level == 0 else "reduce_scatter": blocks}
