"""What differs between a training drawn at random by ranks through bmt and by one process in plain torch."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from random_models import Model
from random_pipelines import PipelinedTraining
from random_plans import Plan
from random_trainings import Record, ShardedTraining, Training

from bmt_testing import run_ranks

AMPLIFIED, AMPLIFIED_MOST = 8.0, 32.0
"""By how many times plain torch's own distance from a training all in float64 a training with float32 may differ from plain torch.

And by how many if the same training in float64 is equal: Adam turns a gradient that is nothing but rounding into a whole update.
"""


class ExactTraining(Training):
    """A training by one process all in float64, which begins with the values of the one that has float32."""

    def build(self, model: Model) -> Any:
        """Widen ``model``."""
        return super().build(model.double())


def run_sharded(plan: Plan, folder: str) -> Record:
    """Train by the ranks of this run. Collective."""
    kind = ShardedTraining if plan.pipeline is None else PipelinedTraining
    return kind(plan, folder).run()


def differences(
    plan: Plan,
    world_size: int,
    folder: str,
    device: str = "cpu",
    run: Callable[..., Record] = run_sharded,
    *arguments: Any,
    timeout: float = 60.0,
) -> list[str]:
    """Train both ways, the ranks on ``device``, and return what differs by more than rounding, first things first.

    Some trainings in float32 amplify rounding, so that one in plain torch differs from itself in float64. By
    :data:`AMPLIFIED` times as much a value may differ here, or by more if float64 decides. ``folder`` is for checkpoints.
    ``run(plan, folder, *arguments)`` is what ranks do, in ``timeout`` seconds at most.
    """
    expected = dict(Training(plan, world_size).run().values)
    # Norms, and so what is clipped, are float32 for any parameters.
    rtol, atol = (1e-3, 1e-4) if plan.dtype == torch.float32 else (1e-5, 1e-6)
    init = {
        "device": device,
        "gradients": "mean" if plan.means else "sum",
        "prefetch_bytes": plan.prefetch_bytes,
        "tp_size": plan.tp_size(world_size),
        "pipe_size": plan.pipe_size(world_size),
        "num_micro_batches": plan.micro_batches(world_size, 0) if plan.pipeline else None,
    }
    messages = []
    most = 0.0  # of differences, in multiples of the rounding of plain torch
    rounding: dict[str, float] | None = None
    seen: set[str] = set()
    for rank, record in enumerate(run_ranks(run, world_size, plan, folder, *arguments, init=init, timeout=timeout)):
        found = dict(record.values)
        seen.update(found)
        # A stage of a pipeline has its own layers.
        unlike = set(found) - set(expected) if plan.pipeline else set(expected) ^ set(found)
        if unlike:
            messages.append(f"rank {rank}: not in both: {sorted(unlike)}")
            most = math.inf
        for name in [name for name in expected if name in found]:
            value, other = expected[name], found[name]
            if not torch.allclose(other.to(value.dtype), value, rtol=rtol, atol=atol):
                off = float((other - value).abs().max())
                if rounding is None:
                    rounding = _rounding(plan, world_size, expected)
                if not off <= AMPLIFIED * rounding[name]:
                    messages.append(f"rank {rank}: {name} is off by {off:.3g}")
                    most = max(most, off / rounding[name] if rounding[name] and math.isfinite(off) else math.inf)
    if missing := set(expected) - seen:
        messages.append(f"on no rank: {sorted(missing)}")
        most = math.inf
    if not messages or most > AMPLIFIED_MOST or plan.dtype == torch.float64:
        return messages
    with tempfile.TemporaryDirectory(dir=folder) as other_folder:
        exact_plan = dataclasses.replace(plan, dtype=torch.float64)
        return differences(exact_plan, world_size, other_folder, device, run, *arguments, timeout=timeout)


def _rounding(plan: Plan, world_size: int, found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far each value that plain torch has ``found`` is from that in float64; 0 where all of the model is float64."""
    exact = dict(ExactTraining(plan, world_size).run().values)
    return {name: float((exact[name] - value).abs().max()) for name, value in found.items()}
