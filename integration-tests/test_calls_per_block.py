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
from compile_models import from_new, graphs
from torch import nn
from torch.nn import functional as F

from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, direct_linear

FEWER, MORE = 4, 8
"""Models of so many blocks are compared: what a step does once does not count."""

MOST = {
    (False, "small"): (456, 302),
    (True, "small"): (567, 469),
    (False, "large"): (514, 342),
    (True, "large"): (651, 523),
    (True, "small, with buffers"): (626, 506),
}
"""The most calls of one block in forward and backward at level 3 on two CPU ranks, in Python and in
C, those of torch's modules and of autograd included; without and with recomputation, of layers
whose weights are small or count as large, and of layers with constant buffers. When there are
fewer, so are these numbers.
"""


MOST_OF_COMPILED = {False: (602, 481), True: (586, 466)}
"""The same of a compiled block, without and with recomputation. Its graph, which "aot_eager" runs,
calls each operation by itself; the calls around it are those of any backend.
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class WithBuffers(Layer):
    """A mask and two rotary tables, which forward leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8))
        self.register_buffer("cos", torch.ones(8, 32))
        self.register_buffer("sin", torch.ones(8, 32))


def calls_of_step(
    blocks: int, recomputes: bool, kind: type[Layer] = Layer, *, compile: bool = False
) -> Counter[str]:
    layers = [Block(kind(), use_checkpoint=recomputes, compile=compile) for _ in range(blocks)]
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


def calls_of_block(recomputes: bool, layer: str) -> tuple[float, float]:
    smallest = 0 if layer == "large" else direct_linear.SMALL
    kind = WithBuffers if "buffers" in layer else Layer
    with patch.object(direct_linear, "SMALL", smallest):
        return calls_of_one(*(calls_of_step(blocks, recomputes, kind) for blocks in (FEWER, MORE)))


def calls_of_compiled_block(recomputes: bool) -> tuple[float, float]:
    kind = type("NewLayer", (Layer,), {})  # Blocks remember what they compiled of a class
    with from_new("aot_eager"):
        few, many = (
            calls_of_step(blocks, recomputes, kind, compile=True) for blocks in (FEWER, MORE)
        )
        assert graphs() == 2  # the input of the first block needs no gradient
    return calls_of_one(few, many)


def calls_of_one(few: Counter[str], many: Counter[str]) -> tuple[float, float]:
    """Return the calls in Python and in C of one of the blocks that there are more of."""
    python, c = ((many[event] - few[event]) / (MORE - FEWER) for event in ("call", "c_call"))
    return python, c


@pytest.mark.parametrize(("recomputes", "layer"), MOST)
def test_a_block_makes_no_more_calls_than_it_did(recomputes: bool, layer: str) -> None:
    check(run_ranks(calls_of_block, 2, recomputes, layer), *MOST[recomputes, layer])


@pytest.mark.parametrize("recomputes", MOST_OF_COMPILED)
def test_a_compiled_block_makes_no_more_calls_than_it_did(recomputes: bool) -> None:
    calls = run_ranks(calls_of_compiled_block, 2, recomputes, timeout=120)
    check(calls, *MOST_OF_COMPILED[recomputes])


def check(calls: list[tuple[float, float]], most_python: int, most_c: int) -> None:
    for python, c in calls:
        assert 0.95 * most_python < python <= most_python
        assert 0.95 * most_c < c <= most_c
