"""A run with ``pipe_size`` and nothing on the stages is refused when it begins to train, and
nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList
from cells import cells


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def wrapped() -> nn.Module:
    return BMTrainModelWrapper(plain())


def listed() -> nn.Module:
    return TransformerBlockList([nn.Linear(4, 4) for _ in range(2)])


def piped() -> nn.Module:
    return PipelineTransformerBlockList([nn.Linear(4, 4) for _ in range(2)])


def block_of_stage() -> nn.Module:
    return Block(nn.Linear(4, 4), mode="PIPE")


def plain_beside_a_list() -> nn.Module:
    piped()
    return wrapped()


@on_ranks(2, init={"pipe_size": 2})
@cells(
    "make, trains",
    [
        *((make, False) for make in (wrapped, listed)),
        *((make, True) for make in (piped, block_of_stage, plain_beside_a_list)),
    ],
)
def test_training_without_layers_on_stages_is_refused_and_nothing_else_is(
    make: Callable[[], nn.Module], trains: bool
) -> None:
    x = torch.ones(1, 4)
    frozen, model = wrapped().requires_grad_(False), make()
    assert frozen(x).shape == (1, 4)
    with torch.no_grad():
        assert model(x).shape == (1, 4)
    for _ in range(2):
        if trains:
            assert model(x).shape == (1, 4)
        else:
            with pytest.raises(
                ConfigError, match=r"^The run has 2 stages, and .*leave out pipe_size"
            ):
                model(x)
