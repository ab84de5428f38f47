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


def loop(mistake: str | None, model: nn.Module, data: Any, rank: int, ranks: int) -> Any:
    """Two steps, with a ``mistake`` that only several ranks make."""
    rate = 0.1 * (ranks if mistake == "rate of ranks" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(1 if mistake == "drops steps" and ranks > 1 else 2):
        if mistake != "keeps gradients" or ranks == 1:
            manager.zero_grad()
        for micro in range(2):
            own = 0 if mistake == "equal rows" else rank
            loss = model(rows_of(data, 2 * step + micro, own, ranks))
            # By the micro-batches of a rank, not of all ranks.
            scaled = loss / (2 * ranks if mistake == "wrong accumulation" else 2)
            if mistake == "gradients without scale":
                scaled.backward()
            else:
                manager.backward(scaled)
        if mistake == "clips parts":
            for parameter in model.parameters():
                parameter.grad.mul_(0.1 / (parameter.grad.norm() + 1e-3))  # type: ignore[union-attr]
        manager.step()
        for _ in range(ranks if mistake == "schedule stepped twice" else 1):
            schedule.step()
        for average, parameter in zip(kept, model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
    loss = loss.detach()
    found = loss if mistake == "loss of one rank" else bmt.mean_loss(loss)
    return [found, *(kept if mistake == "average of parts" else [])]
