"""MLPs of tensor-parallel layers in tiles along the sequence, with and without a pipeline: the
gradients are those without tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_trainings import Bare
from torch import nn
from tp_models import fill

from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_pipeline import train_step
from bmt_testing import run_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear
from bmt_zero import Block

WIDTH, TOKENS, BATCH = 8, 6, 4
OPTIONS: dict[str, Any] = {"dtype": torch.float64}


class Layer(nn.Module):
    """On (batch, tokens / tp, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        up = ColumnParallelLinear(WIDTH, 4 * WIDTH, **OPTIONS)
        down = RowParallelLinear(4 * WIDTH, WIDTH, **OPTIONS)
        self.mlp = nn.Sequential(up, nn.GELU(), down)
        self.mlp.token_wise = True  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def made(level: int, recomputes: bool, tile: int | None) -> Bare:
    return Bare([Block(Layer(), recomputes, level, mode="PIPE", tile=tile) for _ in range(2)])


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * targets).sin().mean()


def trained(schedule: str | None, level: int, recomputes: bool, tile: int | None) -> Any:
    model, manager = made(level, recomputes, tile), OptimManager()
    model.load_state_dict(fill(model))
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    # Each rank along tp has other tokens.
    generator = torch.Generator().manual_seed(current().topology.axis_rank("tp"))
    x, targets = torch.randn(2, BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    gradients = []
    for _ in range(2):
        manager.zero_grad()
        if schedule is None:
            manager.backward(loss_of(model(x), targets))
        else:
            train_step(model, loss_of, (x, targets), schedule, 4, manager=manager)
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        manager.step()
    return gradients, list(model.state_dict().values())


@pytest.mark.parametrize(
    ("schedule", "level", "recomputes", "init"),
    [
        (None, 3, True, {"tp_size": 2}),
        ("zero-bubble", 2, True, {"tp_size": 2, "pipe_size": 2}),
        ("zero-bubble", 2, False, {"pipe_size": 2}),
    ],
)
def test_tiles_of_parallel_layers_have_the_gradients_of_the_whole(
    schedule: str | None, level: int, recomputes: bool, init: dict[str, int]
) -> None:
    ranks = 4 if len(init) > 1 else 2
    init = {"sequence_dim": 1, **init} if "tp_size" in init else init
    expected, found = (
        run_ranks(trained, ranks, schedule, level, recomputes, tile, init=init, timeout=100)
        for tile in (None, 4)
    )
    assert len(found[0][0]) >= 4
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
