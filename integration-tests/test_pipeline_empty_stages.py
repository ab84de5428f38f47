"""A run with ``pipe_size`` and nothing on the stages is refused when it begins to train, and
nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def wrapped() -> nn.Module:
    return BMTrainModelWrapper(plain())


def listed() -> nn.Module:
    return TransformerBlockList([nn.Linear(4, 4) for _ in range(2)])


def attempt(make: Callable[[], nn.Module]) -> list[str]:
    """What a frozen model and one without gradients give before, and then the model in
    training, twice.
    """
    frozen, model = wrapped().requires_grad_(False), make()
    found = [str(tuple(frozen(torch.ones(1, 4)).shape))]
    with torch.no_grad():
        found.append(str(tuple(model(torch.ones(1, 4)).shape)))
    for _ in range(2):
        try:
            found.append(str(tuple(model(torch.ones(1, 4)).shape)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_training_without_layers_on_stages_is_refused_on_every_rank() -> None:
    for make in (wrapped, listed):
        for *before, first, second in run_ranks(attempt, 2, make, init={"pipe_size": 2}):
            assert before == ["(1, 4)"] * 2
            assert first == second and "leave out pipe_size" in first
            assert first.startswith("ConfigError: The run has 2 stages, and ")


def piped() -> nn.Module:
    return PipelineTransformerBlockList([nn.Linear(4, 4) for _ in range(2)])


def block_of_stage() -> nn.Module:
    return Block(nn.Linear(4, 4), mode="PIPE")


def plain_beside_a_list() -> nn.Module:
    piped()
    return wrapped()


def test_a_run_with_layers_on_stages_trains_them_and_other_models() -> None:
    for make in (piped, block_of_stage, plain_beside_a_list):
        found = run_ranks(attempt, 2, make, init={"pipe_size": 2})
        assert found == [["(1, 4)"] * 4] * 2
