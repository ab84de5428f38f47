"""Inputs that wait for backward in host memory: gradients stay what they are in every bit, and the
device's memory is let go.
"""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from keep_models import WIDTH, Attends, assert_equal, blocks_of, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from zero_models import Model, full_gradient, my_part, plain
from zero_models import train as train_model

from bmt_core import ConfigError
from bmt_core.errors import BmtError
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block, BMTrainModelWrapper, host_inputs
from bmt_zero.host_inputs import HostInputs
from bmt_zero.zero_run import zero_run

# The inputs of tests are small, and those of large models are what a test is about.
of_all_sizes = patch.object(host_inputs, "SMALL", 0)
BYTES = 2 * 6 * WIDTH * 4
"""Those of one input."""


@pytest.fixture(autouse=True)
def _all_sizes() -> Any:
    with of_all_sizes:
        yield


def run_inputs() -> HostInputs:
    return zero_run().host_inputs


def offloading(
    layers: list[nn.Module], level: int = 3, keep: Any = None, value: bool | int = True
) -> list[nn.Module]:
    return [
        Block(copy.deepcopy(layer), zero_level=level, keep=keep, offload_inputs=value)
        for layer in layers
    ]


def hidden(step: int = 0, length: int = 6) -> torch.Tensor:
    """An activation: it needs a gradient, and is no leaf."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, length, WIDTH, generator=generator).requires_grad_() * 1


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_training_is_that_of_plain_torch(level: int) -> None:
    expected = plain()
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        Block(layer, zero_level=level)
    with of_all_sizes:
        found = train_model(BMTrainModelWrapper(model, offload_inputs=True), 5, my_part)
    torch.testing.assert_close(
        [found["grad"], found["state"]], [expected["grad"], expected["state"]]
    )
    pool = run_inputs().pool
    assert pool.total > 0 == pool.in_use


@on_ranks(2)
@pytest.mark.parametrize(
    ("keep", "level", "dropout", "dtype", "waiting"),
    [
        (None, 3, 0.3, None, 2),
        (None, 2, 0.3, torch.bfloat16, 1),
        ("attention", 3, 0.3, None, 1),
        (9_000, 0, 0.0, torch.bfloat16, 3),
        (lambda operation, args: operation is torch.Tensor.permute, 2, 0.0, None, 2),
    ],
)
def test_losses_and_gradients_are_those_without_it_in_every_bit(
    keep: Any, level: int, dropout: float, dtype: Any, waiting: int
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends(dropout) for _ in range(3)]
    expected, _ = train(blocks_of(layers, keep, level), dtype, waiting=waiting)
    with of_all_sizes:
        found, _ = train(offloading(layers, level, keep), dtype, waiting=waiting)
    assert_equal(found, expected)
    # Those of the second and third layer; that of the first is a leaf.
    pool = run_inputs().pool
    assert pool.total == 2 * waiting * BYTES and pool.in_use == 0
