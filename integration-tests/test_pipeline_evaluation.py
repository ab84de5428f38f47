"""``eval_step``, and ``train_step`` under ``no_grad``: the loss of plain torch on every rank, and
no gradient changes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipeline_trainings import GRIDS, Piped, Plain, loss_of, text, whole_gradients

from bmt_core.run.runtime import current
from bmt_pipeline import eval_step, train_step
from bmt_testing import run_ranks

LAYERS = 9
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("1f1b", {}),
    "chunks": ("interleaved", {"chunks": 2}),
    "v": ("zero-bubble", {"chunks": 2, "placement": "v"}),
}


def batch(step: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    topology = current().topology
    pipelines, own = topology.axis_size("dp"), topology.axis_rank("dp")
    ids, targets = (x[step].chunk(pipelines)[own].to(device) for x in text())
    return ids, targets


def looked_at(form: str, level: int) -> list[tuple[str, float, bool]]:
    """By what was called: the loss, and whether gradients are those from before."""
    schedule, options = FORMS[form]
    model = Piped(LAYERS, level, True, **options)
    found = []
    ways = {
        "eval_step": (nullcontext, lambda x: eval_step(model, loss_of, x, 4)),
        "eval_step in no_grad": (torch.no_grad, lambda x: eval_step(model, loss_of, x, 4)),
        "no_grad": (torch.no_grad, lambda x: train_step(model, loss_of, x, schedule, 4)),
        "inference_mode": (
            torch.inference_mode,
            lambda x: train_step(model, loss_of, x, schedule, 4),
        ),
    }
    for before in (False, True):
        if before:
            train_step(model, loss_of, batch(0), schedule, 4)
        gradients = {name: grad.clone() for name, grad in whole_gradients(model).items()}
        assert bool(gradients) == before
        for name, (mode, call) in ways.items():
            with mode():
                loss = call(batch(1))
            after = whole_gradients(model)
            is_same = after.keys() == gradients.keys() and all(
                torch.equal(after[k], gradients[k]) for k in after
            )
            found.append((name, float(loss), is_same and not loss.requires_grad))
    return found


@pytest.mark.parametrize(
    ("grid", "form", "level"),
    [
        ("pp 2", "one", 0),
        ("pp 2 x dp 2", "v", 3),
        ("pp 4", "chunks", 3),
    ],
)
def test_a_step_without_gradients_returns_the_loss_and_changes_no_gradient(
    grid: str, form: str, level: int
) -> None:
    ranks, stages = GRIDS[grid]
    ids, targets = (x[1] for x in text())
    wanted = [
        float(loss_of(Plain(LAYERS).double()(part), target).detach())
        for part, target in zip(
            ids.chunk(ranks // stages), targets.chunk(ranks // stages), strict=True
        )
    ]
    results = run_ranks(looked_at, ranks, form, level, init={"pipe_size": stages})
    for rank, found in enumerate(results):
        pipeline = rank % (ranks // stages)
        assert len(found) == 8
        for name, loss, is_same in found:
            assert loss == pytest.approx(wanted[pipeline], rel=1e-6) and is_same, (rank, name)
