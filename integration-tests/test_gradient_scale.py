"""Gradients are those of the global mean loss on every grid, so ``max_norm`` means one thing;
BMTrain's scale is an option.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_core.run.runtime import current
from bmt_testing import run_ranks

GRIDS: dict[str, tuple[int, dict[str, int]]] = {
    "dp 2": (2, {}),
    "pp 2 x tp 2": (4, {"pipe_size": 2, "tp_size": 2}),
}


def layer() -> nn.Module:
    return nn.Sequential(
        bmt.nn.ColumnParallelLinear(8, 16, dtype=torch.float64, gather_input=False),
        nn.Tanh(),
        bmt.nn.RowParallelLinear(16, 8, dtype=torch.float64, all_reduce_output=True),
    )


def plain_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def rows() -> torch.Tensor:
    return torch.arange(64, dtype=torch.float64).reshape(8, 8).sin()


def norms_of_gradients() -> tuple[float, float, dict[str, Any]]:
    """Return the norm as it is, the norm with BMTrain's divisor, and this stage's parameters."""
    topology = current().topology
    model = bmt.PipelineTransformerBlockList([layer, layer])
    bmt.init_parameters(model)
    found = []
    for grad_scale in (None, bmt.config["zero_size"]):
        manager = bmt.optim.OptimManager(grad_scale=grad_scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.add_optimizer(optimizer)
        manager.backward(
            model(rows().chunk(topology.data_size)[topology.data_rank]).square().mean()
        )
        found.append(manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0).item())
        manager.zero_grad()
    return found[0], found[1], model.state_dict()


@pytest.mark.parametrize("grid", GRIDS)
def test_the_norm_of_gradients_is_that_of_plain_torch_on_every_grid_and_bmtrains_is_an_option(
    grid: str,
) -> None:
    ranks, init = GRIDS[grid]
    results = run_ranks(norms_of_gradients, ranks, init=init)
    model = nn.ModuleList([plain_layer(), plain_layer()])
    model.load_state_dict({name: value for *_, state in results for name, value in state.items()})
    x = rows()
    for one in model:
        x = one(x)
    x.square().mean().backward()
    wanted = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for norm, of_bmtrain, _ in results:
        assert norm == pytest.approx(wanted, rel=1e-6)  # formed in float32
        assert of_bmtrain == pytest.approx(
            wanted * init.get("pipe_size", 1) / init.get("tp_size", 1), rel=1e-6
        )
