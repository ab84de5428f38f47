"""How ``faults.py`` judges errors, and what errors say of the layer of calls that differ."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from faults import Fault, named_in, places_in, sentence_about
from torch import nn

from bmt_core import rank
from bmt_core.run.collectives import all_reduce
from bmt_testing import rank_pool
from bmt_zero import BMTrainModelWrapper

FAULT = Fault(kind="adds", rank=1, step=0, layer=0, in_backward=False)


def test_the_judge_reads_what_is_said_of_the_rank_and_of_no_other() -> None:
    error = (
        "Ranks have entered different calls: rank 1 is in call 3 of group dp (ranks 0, 1): a, for"
        " layers.5.weight, made in the forward of layers.2, and the same call of rank 0 is: b, made"
        " in the backward of layers.3. This is rank 0, in b, made in the backward of layers.4."
    )
    assert places_in(error, FAULT) == {"forward of layers.2"}
    others = {"backward of layers.3", "backward of layers.4"}
    assert places_in(error, replace(FAULT, kind="skips")) == others


def test_gradients_are_those_of_the_backward_where_nothing_else_is_said() -> None:
    text = "all_reduce, for gradients of layers.1.up.weight and 5 others"
    assert named_in(text) == {"backward of layers.1"}
    assert named_in(f"{text}, made in the backward of layers.0") == {"backward of layers.0"}


def test_a_table_shows_what_an_error_says_of_the_rank_that_failed() -> None:
    error = (
        "Rank 0 has waited 15 s. It waits for rank 1, in layers.1.up:\n'a|b'. Rank 11 has ended:"
        ' Traceback (most recent call last):\n  File "a.py", line 3\nError: planted'
    )
    assert sentence_about(1, error) == r"It waits for rank 1, in layers.1.up: 'a\|b'."
    assert sentence_about(11, error) == "Rank 11 has ended: Error: planted"
    assert sentence_about(7, error) == "Rank 0 has waited 15 s."


class Layer(nn.Module):
    """A layer without parameters; of its ranks, one calls ``fault`` in its second forward."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls < 2:
            return x
        if rank() == 1 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "shape" or (self.fault == "adds") == (rank() == 1):
            all_reduce(torch.ones(3 + (rank() if self.fault == "shape" else 0)))
        return x


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Layer(fault), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(fault: str) -> None:
    model = BMTrainModelWrapper(Model(fault))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("fault", ["skips", "adds", "shape", "killed"])
def test_a_layer_without_parameters_is_named_where_a_rank_makes_another_call(fault: str) -> None:
    other, _ = rank_pool(2).outcomes(train, fault, init={"timeout": 30}, timeout=60)
    named = places_in(other.error_message, replace(FAULT, kind=fault))
    assert "forward of layers.1" in named, other.error_message
