"""How many functions the host calls for one block of a step, in Python and in C. On a GPU the host
must stay ahead of small blocks; these calls are what it does beyond plain torch's own.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, direct_linear

FEWER, MORE = 4, 8
"""Models of so many blocks are compared: what a step does once does not count."""

MOST = {
    (False, "small"): (474, 315),
    (True, "small"): (593, 490),
    (False, "large"): (532, 347),
    (True, "large"): (677, 536),
}
"""The most calls of one block in forward and backward at level 3 on two CPU ranks, in Python and in
C, those of torch's modules and of autograd included; without and with recomputation, of layers
whose weights are small or count as large. When there are fewer, so are these numbers.
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def calls_of_step(blocks: int, recomputes: bool) -> Counter[str]:
    layers = [Block(Layer(), use_checkpoint=recomputes) for _ in range(blocks)]
    model, x, counts = (
        BMTrainModelWrapper(nn.Sequential(*layers)),
        torch.randn(8, 32),
        Counter[str](),
    )

    def step() -> None:
        model(x).sum().backward()

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        # How many collectives are still under way depends on their speed.
        if code.co_name not in ("is_over", "<genexpr>") or "bmt_core" not in code.co_filename:
            counts[event] += 1

    for _ in range(5):
        step()
        model.zero_grad()
    threading.setprofile(count)
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    threading.setprofile(None)
    return counts


def calls_of_block(recomputes: bool, weights: str) -> tuple[float, float]:
    smallest = 0 if weights == "large" else direct_linear.SMALL
    with patch.object(direct_linear, "SMALL", smallest):
        few, many = (calls_of_step(blocks, recomputes) for blocks in (FEWER, MORE))
    python, c = ((many[event] - few[event]) / (MORE - FEWER) for event in ("call", "c_call"))
    return python, c


@pytest.mark.parametrize(("recomputes", "weights"), MOST)
def test_a_block_makes_no_more_calls_than_it_did(recomputes: bool, weights: str) -> None:
    most_python, most_c = MOST[recomputes, weights]
    for python, c in run_ranks(calls_of_block, 2, recomputes, weights):
        assert 0.95 * most_python < python <= most_python
        assert 0.95 * most_c < c <= most_c
