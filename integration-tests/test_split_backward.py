"""Schedules that compute weight gradients later train Blocks as plain torch does, and to the last
bit as those that do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_schedules import MICRO_BATCHES, run_step
from torch import nn
from zero_models import Uses, full_gradient

from bmt_core import rank, world_size
from bmt_testing import run_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear
from bmt_zero import Block

STEPS, SAMPLES, WIDTH = 3, 4, 6
TP = {"tp_size": 2}
Result = dict[str, Any]


def batch(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the samples of a micro-batch on all ranks."""
    return torch.randn(
        SAMPLES, 4, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(number)
    )


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Uses().to(dtype) for _ in range(2)])


def train(model: nn.Sequential, part: slice, schedule: str | None, delay: int | None) -> Result:
    """Return losses of this process's samples, the gradients of each step, and the parameters after
    the last.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = next(model.parameters()).dtype
    losses, gradients = [], []

    def loss_of(number: int) -> torch.Tensor:
        return model(batch(number, dtype)[part]).square().mean((1, 2)).sum() / SAMPLES

    for step in range(STEPS):
        optimizer.zero_grad()
        numbers = range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        if schedule is None:
            for number in numbers:
                loss = loss_of(number)
                loss.backward()
                losses.append(loss.detach())
        else:
            losses += run_step(schedule, model, lambda micro, n=numbers: loss_of(n[micro]), delay)  # type: ignore[misc]
        gradients.append([full_gradient(parameter) for parameter in model.parameters()])
        optimizer.step()
    return {
        "losses": losses,
        "gradients": gradients,
        "state": [v.clone() for v in model.state_dict().values()],
    }


def plain(dtype: torch.dtype) -> Result:
    return train(layers(dtype), slice(None), None, None)


def sharded(
    level: int, dtype: torch.dtype, settings: dict[str, Any], runs: list[tuple[str, int | None]]
) -> list[Result]:
    share = SAMPLES // world_size()
    found = []
    for schedule, delay in runs:
        model = layers(dtype)
        for layer in model:
            Block(layer, zero_level=level, **settings)
        found.append(train(model, slice(rank() * share, (rank() + 1) * share), schedule, delay))
    return found


CASES: list[tuple[int, int, torch.dtype, dict[str, Any]]] = [
    (1, 3, torch.bfloat16, {"use_checkpoint": False}),
    # Reduced in float32: nothing is written in place.
    (2, 0, torch.bfloat16, {"use_checkpoint": False}),
    (2, 1, torch.bfloat16, {"use_checkpoint": True, "reduce_dtype": "fp32"}),
    (2, 2, torch.bfloat16, {"use_checkpoint": False, "reduce_dtype": "param"}),
    (2, 3, torch.float32, {"use_checkpoint": True}),
    (4, 3, torch.float32, {"use_checkpoint": False}),
]


@pytest.mark.parametrize(("ranks", "level", "dtype", "settings"), CASES, ids=str)
def test_postponed_gradients_are_those_of_an_ordinary_backward(
    ranks: int, level: int, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    expected = plain(dtype)
    runs = [(schedule, delay) for schedule in ("gpipe", "1f1b") for delay in (None, 2)]
    of_ranks = run_ranks(sharded, ranks, level, dtype, settings, runs, timeout=300)
    for results in of_ranks:
        for ordinary, postponed in (results[:2], results[2:]):
            torch.testing.assert_close(postponed, ordinary, rtol=0.0, atol=0.0)
    for results in zip(*of_ranks, strict=True):
        if dtype != torch.bfloat16:  # other tests say what half types come to
            losses = [
                sum(of_one)
                for of_one in zip(*[result["losses"] for result in results], strict=True)
            ]
            for result in results:
                torch.testing.assert_close(
                    {**result, "losses": losses}, expected, rtol=1e-4, atol=1e-5
                )


class TensorParallel(nn.Module):
    """Layers of bmt-tp, of which each rank computes a part; they write their gradients through the
    Block's seam.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 8, gather_input=True, dtype=torch.float64)
        self.down = RowParallelLinear(8, WIDTH, all_reduce_output=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def tensor_parallel(level: int, use_checkpoint: bool) -> list[Result]:
    found = []
    for delay in (None, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(TensorParallel(), use_checkpoint, level) for _ in range(2)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(
                    torch.linspace(-0.5, 0.5, max(1, parameter.numel()), dtype=torch.float64)[
                        : parameter.numel()
                    ]
                )
        share = SAMPLES // world_size()
        found.append(train(model, slice(rank() * share, (rank() + 1) * share), "1f1b", delay))
    return found


@pytest.mark.parametrize(("ranks", "level", "use_checkpoint"), [(2, 3, True), (4, 0, False)])
def test_layers_of_tensor_parallelism_leave_their_products_too(
    ranks: int, level: int, use_checkpoint: bool
) -> None:
    # That ordinary backward passes of these layers are right is compared with plain
    # torch elsewhere.
    for ordinary, postponed in run_ranks(tensor_parallel, ranks, level, use_checkpoint, init=TP):
        torch.testing.assert_close(postponed, ordinary, rtol=0.0, atol=0.0)
        assert all(
            gradient is not None and gradient.any()
            for gradients in postponed["gradients"]
            for gradient in gradients
        )
