"""Trainings of layers that compute in float8, for tests on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from float8_models import Gpt, batch, in_float8
from torch import nn
from zero_models import full_gradient, of_all_ranks

import bmtrain as bmt
from bmt_core.run.runtime import current, rank, world_size
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, no_sync

STEPS = 5


def model_of(
    recipe: str | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
    compile: bool = False,
    seed: int = 0,
) -> Gpt:
    """Return the same model wherever it is called, in float8 by ``recipe``, emulated on the CPU."""
    torch.manual_seed(seed)
    device = current().device
    model = Gpt(tied=tied).to(device, dtype)
    if recipe is not None:
        in_float8(model.layers, recipe, emulate=device.type == "cpu")
    if compile:
        for layer in model.layers:
            layer.compile()
    return model


def losses_and_gradients(
    model: nn.Module, own: list[int], parts: int, *, holds_back: bool = False
) -> dict[str, Any]:
    """Train on the ``own`` ones of the ``parts`` of a batch, each in a call of its own, because the
    scale of a product is that of its rows; return the sums of the losses of steps, and the whole
    gradients of the first.

    ``holds_back``: gradients stay on their rank until the last part.
    """
    batches = batch(0).to(current().device).chunk(parts)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    values: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        losses = []
        for part in own:
            with no_sync(model) if holds_back and part != own[-1] else nullcontext():
                losses.append(model(batches[part]))
                (losses[-1] / parts).backward()
        if step == 0:
            values |= {name: full_gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        values["losses"].append(sum(loss.item() for loss in losses))
    return values


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, in parts of the norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(
    recipe: str,
    recompute: bool,
    compile: bool,
    largest: float,
    *,
    tied: bool = False,
    micro_batches: int = 1,
) -> None:
    """Train Blocks of levels 0 to 3 and plain torch; the gradients of a weight may be ``largest``
    apart.
    """
    parts = micro_batches * world_size()
    everything = list(range(parts))
    plain = "tensorwise" if recipe == "gathered" else recipe
    expected = losses_and_gradients(model_of(plain, tied=tied, compile=compile), everything, parts)
    without = losses_and_gradients(model_of(None, tied=tied), everything, parts)
    model = model_of(recipe, tied=tied)
    for level, layer in enumerate(model.layers):
        Block(layer, use_checkpoint=recompute, zero_level=level, compile=compile)
    own = everything[rank() :: world_size()]
    found = losses_and_gradients(BMTrainModelWrapper(model), own, parts, holds_back=True)
    losses = torch.tensor(of_all_ranks(found.pop("losses"))).sum(0).tolist()
    assert losses == pytest.approx(expected.pop("losses"), rel=0.02) and losses[-1] < losses[0]
    distances = {name: distance(found[name], expected[name]) for name in expected}
    assert max(distances.values()) < largest, distances
    if not compile:  # so the gradients above are those of float8
        assert max(distance(without[name], expected[name]) for name in expected) > 2 * largest


def check_tied(recipe: str) -> None:
    """Train with tied weights and two micro-batches of each rank, which holds back the first."""
    check(recipe, True, False, 0.01, tied=True, micro_batches=2)


# --- checkpoints ---


def mean_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of this rank's part of a batch, which is cut into four parts on any number of
    ranks: the scale of a product is that of the rows in it.
    """
    parts = batch(step).to(current().device).chunk(4)
    losses = [model(part) for part in parts[rank() :: world_size()]]
    return torch.stack(losses).mean()


def trained(
    folder: Path, first: int, last: int, recipe: str, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Go on from the checkpoint before step ``first``, if that is not 0; return the losses, and the
    weights after step ``last``, where a checkpoint is made.
    """
    model = BMTrainModelWrapper(model_of(recipe, dtype=dtype, seed=first))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    if first > 0:
        assert bmt.load_checkpoint(folder, model, manager)["step"] == first
    losses = []
    for step in range(first, last):
        loss = mean_loss(model, step)
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    bmt.save_checkpoint(folder, model, manager, step=last)
    bmt.save(model, folder / "model.pt")
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def trained_in_runs(
    folder: Path, runs: Sequence[tuple[int, int]], recipe: str, dtype: torch.dtype, device: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in ``runs`` of (ranks, steps), each of which goes on where the one before has ended;
    return all losses, and the weights at the end.
    """
    losses: list[float] = []
    first, init = 0, {"device": device}
    for ranks, steps in runs:
        settings = (folder, first, first + steps, recipe, dtype)
        (more, weights), *_ = run_ranks(trained, ranks, *settings, init=init, timeout=120)
        losses, first = [*losses, *more], first + steps
    return losses, weights
