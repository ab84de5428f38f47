"""``eval_step``, and ``train_step`` under ``no_grad``: the loss of plain torch on every rank, and
no gradient changes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipeline_trainings import GRIDS, Piped, Plain, loss_of, of_pipeline, text, whole_gradients

from bmt_core.run.runtime import current
from bmt_pipeline import eval_step, train_step
from bmt_testing import run_ranks

LAYERS = 9
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("1f1b", {}),
    "chunks": ("interleaved", {"chunks": 2}),
    "v": ("zero-bubble", {"chunks": 2, "placement": "v"}),
}


def batch(step: int) -> Any:
    return of_pipeline(*(x[step] for x in text()))


def look(form: str, level: int) -> None:
    """Steps in all ways, before there are gradients and after."""
    topology = current().topology
    schedule, options = FORMS[form]
    model = Piped(LAYERS, level, True, **options)
    pipelines, own = topology.axis_size("dp"), topology.axis_rank("dp")
    ids, targets = (x[1].chunk(pipelines)[own] for x in text())
    wanted = float(loss_of(Plain(LAYERS).double()(ids), targets).detach())
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
            assert not loss.requires_grad and float(loss) == pytest.approx(wanted, rel=1e-6), name
            torch.testing.assert_close(whole_gradients(model), gradients, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("grid", "form", "level"), [("pp 2", "one", 0), ("pp 2 x dp 2", "v", 3), ("pp 4", "chunks", 3)]
)
def test_a_step_without_gradients_returns_the_loss_and_changes_no_gradient(
    grid: str, form: str, level: int
) -> None:
    ranks, stages = GRIDS[grid]
    run_ranks(look, ranks, form, level, init={"pipe_size": stages})
