"""The running loss is that of the plain Trainer, also where losses are not finite."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch

import bmt_core
from bmt_hf.running_loss import RunningLoss
from bmt_testing import run_ranks

LOSSES = [2.0, math.nan, 4.0, math.inf, 1.0, 3.0]


def of_plain_trainer(losses: list[float], *, skips: bool) -> tuple[list[float], float]:
    """Logged every second step, the first after the step 10."""
    total, total_of_logs, last, means = 0.0, 0.0, 10, []
    for step, loss in enumerate(losses, 10):
        total += total / (1 + step - last) if skips and not math.isfinite(loss) else loss
        if step % 2:
            means.append(total / (step + 1 - last))
            total_of_logs, total, last = total_of_logs + total, 0.0, step + 1
    return means, total_of_logs / len(losses)


def logged(skips: bool) -> tuple[list[float], float]:
    running = RunningLoss(torch.device("cpu"), 10, skip_non_finite=skips)
    means = []
    for step, loss in enumerate(LOSSES, 10):
        running.add(torch.tensor(loss + bmt_core.rank()), step)
        if step % 2:
            means.append(running.mean(step + 1))
    return means, running.mean_of_all(10 + len(LOSSES))


@pytest.mark.parametrize("skips", [True, False])
def test_losses_that_are_not_finite_are_replaced_if_that_is_asked_for(skips: bool) -> None:
    of_ranks = [
        of_plain_trainer([loss + rank for loss in LOSSES], skips=skips) for rank in range(2)
    ]
    means = [sum(pair) / 2 for pair in zip(of_ranks[0][0], of_ranks[1][0], strict=True)]
    total = (of_ranks[0][1] + of_ranks[1][1]) / 2
    for found_means, found_total in run_ranks(logged, 2, skips):
        torch.testing.assert_close((found_means, found_total), (means, total), equal_nan=True)
