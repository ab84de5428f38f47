"""Trainings of a model of parallel layers in Blocks, and of the dense model in one process."""

from __future__ import annotations

from typing import Any

import torch
from pipeline_trainings import Record, compare
from torch import nn
from tp_models import VOCABULARY, Net, fill, gradients_of, tp

from bmt_core.run.collectives import all_gather, all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_testing import run_ranks
from bmt_zero import Block
from bmtrain.loss import FusedCrossEntropy

STEPS, SEQUENCE = 5, 8
GRIDS = {"tp 1": (1, 1), "tp 2": (2, 2), "tp 4": (4, 4), "tp 2 x dp 2": (4, 2), "dp 2": (2, 1)}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": AdamOptimizer, "offload": AdamOffloadOptimizer}

# A large eps: the gradient of the keys' bias is zero but for rounding, which Adam would make as
# large as any other.
SETTINGS: dict[str, dict[str, float]] = {"sgd": {}, "adam": {"eps": 1e-2}, "offload": {"eps": 1e-2}}


def text(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per step, ids and targets of ``batch`` sequences."""
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(VOCABULARY, (STEPS, batch, SEQUENCE + 1), generator=generator)
    return data[:, :, :-1], data[:, :, 1:].clone()


def expected(dtype: torch.dtype, optimizer: str, batch: int) -> Record:
    """The losses, the gradients of each step, and the parameters after the last."""
    model = Net(dtype)
    model.load_state_dict(fill(model))
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    made = kind(model.parameters(), lr=0.05, **SETTINGS[optimizer])
    losses, gradients = [], []
    for ids, targets in zip(*text(batch), strict=True):
        made.zero_grad()
        logits = model(ids.t())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        losses.append(float(loss.detach()))
        made.step()
    return losses, gradients, dict(model.state_dict())


def sharded(
    dtype: torch.dtype, optimizer: str, batch: int, block: dict[str, Any], options: dict[str, Any]
) -> Record:
    """The same by parallel layers; each data-parallel rank has its sequences, each tp rank its part
    of the positions.
    """
    model = Net(dtype, wrap=lambda layer: Block(layer, **block), **options)
    model.load_state_dict(fill(model))
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05, **SETTINGS[optimizer])
    manager = OptimManager()
    manager.add_optimizer(made)
    loss_of = FusedCrossEntropy(parallel=True)
    topology, device = current().topology, current().device
    index, size = tp()
    losses, gradients = [], []
    for ids, targets in zip(*[part.to(device) for part in text(batch)], strict=True):
        own_ids, own_targets = [
            part.chunk(topology.data_size)[topology.data_rank] for part in (ids, targets)
        ]
        manager.zero_grad()
        logits = model(own_ids.t().chunk(size)[index])
        loss = loss_of(logits.flatten(0, 1), own_targets.flatten())
        manager.backward(loss)
        gradients.append({name: gradient.cpu() for name, gradient in gradients_of(model).items()})
        losses.append(float(all_reduce(loss.detach(), "avg")))
        manager.step()
    return losses, gradients, {name: value.cpu() for name, value in model.state_dict().items()}


def check(
    grid: str,
    *,
    training: Any = sharded,
    arguments: tuple[Any, ...] = (),
    init: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "sgd",
    batch: int = 2,
    block: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Compare ``training``, by default :func:`sharded`, on the ranks of ``grid``
    with :func:`expected`.

    ``block``: arguments of each Block, ``options``: of the parallel layers.
    """
    ranks, tp_size = GRIDS[grid]
    tolerance = (
        1e-6
        if dtype == torch.float64 and optimizer == "sgd"
        else 1e-5
        if dtype == torch.float64
        else 2e-3
    )
    wanted = expected(dtype, optimizer, batch)
    settings = {"tp_size": tp_size, **(init or {})}
    given = (dtype, optimizer, batch, block or {}, options or {})
    results = run_ranks(training, ranks, *given, *arguments, init=settings, timeout=180)
    for found in results:
        compare(found, wanted, tolerance)
        for name, value in found[2].items():  # what is replicated is bit-identical
            assert torch.equal(value, results[0][2][name]), name


def step(model: nn.Module, manager: OptimManager) -> None:
    """One step on the first batch."""
    index, size = tp()
    ids, targets = (part[0].to(current().device) for part in text(2))
    manager.zero_grad()
    logits = model(ids.t().chunk(size)[index])
    manager.backward(FusedCrossEntropy(parallel=True)(logits.flatten(0, 1), targets.flatten()))
    manager.step()


def thirty_steps() -> list[torch.Tensor]:
    """The values that each rank holds of what is replicated, stacked, after as many steps."""
    model = Net(torch.bfloat16, layers=1, wrap=Block)
    model.load_state_dict({name: value.bfloat16() for name, value in fill(model).items()})
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters(), lr=0.01))
    for _ in range(30):
        step(model, manager)
    shared = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("out.bias")]
    return [all_gather(p.gather()) for p in shared]  # type: ignore[operator]
