"""Schedules drive Blocks through ``set_use``: gathers and reductions are counted, gradients
compared with plain torch.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import bmt_recording
import pytest
import torch
from block_schedules import MICRO_BATCHES, SCHEDULES, run_step
from torch import nn
from zero_models import full_gradient

from bmt_core import rank, world_size
from bmt_testing import run_ranks
from bmt_zero import Block
from pairwise import pairwise

STEPS = 3


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.norm, self.down = (
            nn.Linear(6, 9),
            nn.LayerNorm(9),
            nn.Linear(9, 6, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.norm(self.up(x))))
        return out


def batch(step: int, micro: int, of: int) -> torch.Tensor:
    return torch.randn(
        2,
        6,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(100 * step + 10 * micro + of),
    )


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
