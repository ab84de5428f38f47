"""Models from configurations alone: made on the meta device, trained by the optimizer manager,
resumed on other ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bmt_checkpoint

pytest.importorskip("transformers")

import torch
from hf_models import MODELS, initialized_by_hugging_face, inputs

from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_testing import run_ranks
from bmt_zero import BMTrainModelWrapper

STEPS, MAX_NORM = 4, 0.5
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}


def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms of the gradients before they are clipped, and the parameters in the end."""
    model = initialized_by_hugging_face(name).train()
    optimizer = torch.optim.Adam(model.parameters(), **SETTINGS)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            (model(**inputs(step, part, 2)).loss / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms, dict(model.state_dict())


def trained(
    name: str, path: str, first: int, last: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps ``first`` to ``last``; a run that does not begin draws nothing, and reads what the one
    before wrote.
    """
    with torch.device("meta"):
        model = MODELS[name]()
        torch.manual_seed(0)
        BMTrainModelWrapper(model, init=first == 0)
    optimizer = AdamOptimizer(model.parameters(), **SETTINGS)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    if first:
        bmt_checkpoint.load_checkpoint(path, model, manager)
    model.train()
    parts = range(runtime.rank(), 2, runtime.world_size())
    norms = []
    for step in range(first, last):
        manager.zero_grad()
        for part in parts:
            manager.backward(model(**inputs(step, part, 2)).loss / len(parts))
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)))
        manager.step()
    bmt_checkpoint.save_checkpoint(path, model, manager)
    return norms, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["mixtral"])
def test_a_run_begun_on_meta_and_resumed_on_meta_equals_plain_torch(
    name: str, tmp_path: Path
) -> None:
    norms, state = plain(name)
    path = str(tmp_path / "run")
    begun = run_ranks(trained, 2, name, path, 0, 2)
    resumed = run_ranks(trained, 1, name, path, 2, STEPS)
    for found, _ in begun:
        torch.testing.assert_close(found, norms[:2], rtol=1e-4, atol=0)
    for found, values in resumed:
        torch.testing.assert_close(found, norms[2:], rtol=1e-4, atol=0)
        torch.testing.assert_close(values, state, rtol=1e-4, atol=1e-6)
