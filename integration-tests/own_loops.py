"""Loops as users write them, and such with a mistake that only several ranks make: those that
:mod:`own_models` compares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmtrain as bmt

WIDTH = 6


def rows_of(data: Any, number: int, rank: int, ranks: int) -> Any:
    """Return this rank's rows of micro-batch ``number``."""
    return data[4 * number + rank : 4 * (number + 1) : ranks]


def rows_of_a_loop(seed: int) -> torch.Tensor:
    return torch.randn(4 * 4, WIDTH)


def loop_of_a_manager(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    """Two steps with accumulation, clipping, a schedule, an average of weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer, schedule)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = []
    for step in range(2):
        manager.zero_grad()
        for micro in range(2):
            loss = model(rows_of(data, 2 * step + micro, rank, ranks))
            manager.backward(loss / 2)
            losses.append(bmt.mean_loss(loss.detach()))
        norm = manager.clip_grad_norm(model.parameters(), 0.1)
        manager.step()
        average.update_parameters(model)
    return {"losses": losses, "norm": norm, "average": average}


def plain_loop(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    """Two steps of a loop without a manager, for gradients that are means."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss = model(rows_of(data, step, rank, ranks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bmt.mean_loss(loss.detach())


def loop(
    model: nn.Module,
    data: Any,
    rank: int,
    ranks: int,
    *,
    divides: float = 1.0,
    steps_schedule: int = 1,
    clears: bool = True,
    same_rows: bool = False,
    own_loss: bool = False,
    clips_parts: bool = False,
    keeps_average: bool = False,
    unscaled: bool = False,
    drops: bool = False,
    rate: float = 0.1,
) -> Any:
    """Two steps, with the mistakes that are asked for, which only several ranks make."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(1 if drops else 2):
        if clears:
            manager.zero_grad()
        for micro in range(2):
            number = 2 * step + micro
            rows = rows_of(data, number, 0 if same_rows else rank, ranks)
            loss = model(rows)
            scaled = loss / divides
            scaled.backward() if unscaled else manager.backward(scaled)
        if clips_parts:
            for parameter in model.parameters():
                parameter.grad.mul_(0.1 / (parameter.grad.norm() + 1e-3))  # type: ignore[union-attr]
        manager.step()
        for _ in range(steps_schedule):
            schedule.step()
        for average, parameter in zip(kept, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
    loss = loss.detach()
    found = loss if own_loss else bmt.mean_loss(loss)
    return [found, *(kept if keeps_average else [])]


def right_loop(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2)


def wrong_accumulation(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    """It divides by the micro-batches of all ranks."""
    return loop(model, data, rank, ranks, divides=2 * ranks)


def gradients_without_scale(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, unscaled=True)


def average_of_parts(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, keeps_average=True)


def sampler_of_equal_rows(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, same_rows=True)


def schedule_stepped_twice(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, steps_schedule=ranks)


def loss_of_one_rank(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, own_loss=True)


def clips_by_norms_of_parts(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, clips_parts=True)


def steps_are_dropped(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, drops=ranks > 1)


def rate_grows_with_ranks(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, rate=0.1 * ranks)


def gradients_are_kept(model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    return loop(model, data, rank, ranks, divides=2, clears=ranks == 1)
