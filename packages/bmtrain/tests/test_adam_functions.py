"""BMTrain's functions for one update, compared with the optimizer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bmt_optim")

import torch

from bmt_optim import AdamOptimizer
from bmtrain._adam_functions import adam_bf16, adam_cpu, adam_fp16, bf16_from_fp32, fp16_from_fp32

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "lr": 0.1, "scale": 8.0, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("function", "dtype", "moment"),
    [
        (adam_fp16, torch.float16, torch.float16),
        (adam_bf16, torch.bfloat16, torch.bfloat16),
        (adam_cpu, torch.float16, torch.float32),
    ],
)
def test_updates_are_those_of_the_optimizer(
    function: Any, dtype: torch.dtype, moment: torch.dtype
) -> None:
    start = torch.linspace(-1, 1, 7)
    expected = torch.nn.Parameter(start.to(dtype))
    optimizer = AdamOptimizer([expected], 0.1, (0.9, 0.95), 1e-6, 0.1)
    master, half = start.to(dtype).float(), start.to(dtype)
    mean, square = torch.zeros(7, dtype=moment), torch.zeros(7)
    more = (None,) if function is adam_cpu else ()
    for step in range(1, 4):
        gradient = (torch.arange(7.0) * step).to(dtype)
        expected.grad = gradient.clone()
        optimizer.step(scale=8.0)
        function(master, half, *more, gradient, mean, square, *SETTINGS.values(), step)
    # The first moment is rounded to the half type after each update.
    coarse = 0.0 if moment == torch.float32 else 0.02
    torch.testing.assert_close(half, expected.detach(), rtol=coarse, atol=coarse)
    torch.testing.assert_close(
        half, (bf16_from_fp32 if dtype == torch.bfloat16 else fp16_from_fp32)(master)
    )


def test_deltas_are_recorded_by_the_optimizer_only() -> None:
    some = torch.zeros(2)
    with pytest.raises(ValueError, match="AdamOffloadOptimizer"):
        adam_cpu(some, some.half(), some, some.half(), some, some, *SETTINGS.values(), 1)  # type: ignore[arg-type]
