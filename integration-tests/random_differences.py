"""What differs between a training drawn at random by ranks through bmt and by one process in
plain torch.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from random_models import Model
from random_pipelines import PipelinedTraining
from random_plans import Plan
from random_trainings import ShardedTraining, Training

from bmt_testing import comparison, run_ranks
from bmt_testing.comparison import Difference, Record, may_be_rounding, rounding_of


class ExactTraining(Training):
    """A training by one process all in float64, which begins with the values of the one that
    has float32.
    """

    def build(self, model: Model) -> Any:
        """Widen ``model``."""
        return super().build(model.double())


def run_sharded(plan: Plan, folder: str) -> Record:
    """Train by the ranks of this run. Collective."""
    kind = ShardedTraining if plan.pipeline is None else PipelinedTraining
    return kind(plan, folder).run()


def settings_of(plan: Plan, world_size: int, device: str) -> dict[str, Any]:
    """Return what ``init_distributed`` is given for the training on ``world_size`` ranks."""
    return {
        "device": device,
        "gradients": "mean" if plan.means else "sum",
        "prefetch_bytes": plan.prefetch_bytes,
        "tp_size": plan.tp_size(world_size),
        "pipe_size": plan.pipe_size(world_size),
        "shard_size": plan.shard_size_of(world_size),
        "optimizer_shards": plan.optimizer_shards,
        "num_micro_batches": plan.micro_batches(world_size, 0) if plan.pipeline else None,
    }


def differences(
    plan: Plan,
    world_size: int,
    folder: str,
    device: str = "cpu",
    run: Callable[..., Record] = run_sharded,
    *arguments: Any,
    timeout: float = 60.0,
) -> list[Difference]:
    """Train both ways, the ranks on ``device``, and return what differs by more than rounding,
    first things first.

    Some trainings in float32 amplify rounding, so that one in plain torch differs from itself in
    float64: see :mod:`bmt_testing.comparison`, which then lets float64 decide. ``folder`` is for
    checkpoints. ``run(plan, folder, *arguments)`` is what ranks do, in ``timeout`` seconds at most.
    """
    expected = [dict(Training(plan, world_size).run().values)] * world_size
    # Norms, and so what is clipped, are float32 for any parameters.
    rtol, atol = (1e-3, 1e-4) if plan.dtype == torch.float32 else (1e-5, 1e-6)
    init = settings_of(plan, world_size, device)
    records = run_ranks(run, world_size, plan, folder, *arguments, init=init, timeout=timeout)

    def rounding() -> list[dict[str, float]]:
        """How far plain torch is from float64; 0 where all of the model is float64."""
        exact = dict(ExactTraining(plan, world_size).run().values)
        return rounding_of(expected[:1], [exact]) * world_size

    unlike = comparison.differences(
        expected,
        [dict(record.values) for record in records],
        floor=lambda name, value: atol + rtol * value.abs(),
        rounding=rounding,
        may_lack=plan.pipeline is not None,  # a stage of a pipeline has its own layers
    )
    if not unlike or not may_be_rounding(unlike) or plan.dtype == torch.float64:
        return unlike
    with tempfile.TemporaryDirectory(dir=folder) as other_folder:
        exact_plan = dataclasses.replace(plan, dtype=torch.float64)
        return differences(
            exact_plan, world_size, other_folder, device, run, *arguments, timeout=timeout
        )
