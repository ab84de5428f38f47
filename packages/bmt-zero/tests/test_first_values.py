"""Ranks that begin with different values find it out at the first call; ``sync="rank0"`` makes
them alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_core import ConfigError, rank
from bmt_params import DistributedModule, DistributedParameter, init_parameters
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from bmtrain.nn import Linear
from cells import cells


class Model(nn.Module):
    """Two layers, one with a buffer, and a head."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x - self.mean)
        return out


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Model()


X = torch.ones(2, 4)


def other_seeds() -> nn.Module:
    return BMTrainModelWrapper(made(rank()))


def one_layer_loaded_on_rank_0_only() -> nn.Module:
    model = made()
    if rank() == 0:
        nn.init.ones_(model.head.weight)
    return BMTrainModelWrapper(model)


def a_buffer() -> nn.Module:
    model = made()
    model.mean += rank()
    return BMTrainModelWrapper(model)


def a_buffer_in_a_block() -> nn.Module:
    model = made()
    model.layers[1].running_var.add_(rank())
    return BMTrainModelWrapper(model)


def a_block_without_a_wrapper() -> nn.Module:
    torch.manual_seed(rank())
    return Block(nn.Linear(4, 4))


def a_state_on_rank_0_only_after_wrapping() -> nn.Module:
    model = BMTrainModelWrapper(made())
    if rank() == 0:
        model.load_state_dict(made(3).state_dict())
    return model


def a_state_of_each_ranks_own() -> nn.Module:
    model = BMTrainModelWrapper(made())
    model.load_state_dict(made(rank()).state_dict())
    return model


def a_write_of_rank_0_to_a_whole_parameter() -> nn.Module:
    model = BMTrainModelWrapper(made())
    with bmt_params.whole_parameters(model):
        if rank() == 0:
            nn.init.ones_(model.head.weight)
    return model


def a_gathered_copy_filled_with_numbers_of_the_ranks_own() -> nn.Module:
    model = BMTrainModelWrapper(made())
    torch.manual_seed(rank())
    nn.init.normal_(model.head.weight)
    return model


def numbers_of_the_ranks_own_by_init_parameters() -> nn.Module:
    torch.manual_seed(rank())
    layer = Linear(4, 3)
    init_parameters(layer)
    return layer


def numbers_of_the_ranks_own_for_a_model_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(rank())
    return BMTrainModelWrapper(model)


class Gain(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.gain = DistributedParameter(torch.full((4,), float(rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (other_seeds, "weight"),
    (one_layer_loaded_on_rank_0_only, r"head\.weight"),
    (a_buffer, r"the buffer Model\.mean"),
    (a_buffer_in_a_block, r"the buffer BatchNorm1d\.running_var"),
    (a_block_without_a_wrapper, "weight"),
    (a_state_on_rank_0_only_after_wrapping, "weight"),
    (a_state_of_each_ranks_own, "weight"),
    (a_write_of_rank_0_to_a_whole_parameter, r"head\.weight"),
    (a_gathered_copy_filled_with_numbers_of_the_ranks_own, r"head\.weight"),
    (numbers_of_the_ranks_own_by_init_parameters, r"Linear\.weight"),
    (numbers_of_the_ranks_own_for_a_model_on_meta, "weight"),
    (Gain, r"Gain\.gain"),
]


@on_ranks(4)
@cells(("make", "name"), CASES)
def test_ranks_that_begin_with_other_values_are_told_which(
    make: Callable[[], nn.Module], name: str
) -> None:
    model = make()
    with pytest.raises(
        ConfigError, match=f"{name} has other values on rank 1 than on rank 0"
    ) as caught:
        model(X)
    assert "BMTrainModelWrapper(model, sync='rank0')" in str(caught.value)
    assert "A buffer that is to differ is set after wrapping" in str(caught.value)


@on_ranks(4)
def test_rank_0_sends_its_values_to_all() -> None:
    plain, model = made(), made(rank())
    model.mean += rank()
    BMTrainModelWrapper(model, sync="rank0")
    plain(X)  # moves the running mean
    model(X).sum().backward()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@on_ranks(2)
def test_a_buffer_of_a_ranks_own_is_set_after_wrapping() -> None:
    model = BMTrainModelWrapper(made()).eval()
    model.mean = torch.full((4,), float(rank()))
    model.layers[1].running_mean.fill_(rank())
    model(X)
    assert model.mean[0] == model.layers[1].running_mean[0] == rank()


@on_ranks(2)
def test_expanded_and_conjugated_buffers_are_sent_too() -> None:
    model = made()
    model.register_buffer("turn", torch.tensor([1 + 1j * (rank() + 1)]).conj())
    model.register_buffer("scale", torch.tensor([[rank() + 1.0], [2.0]]).expand(2, 3))
    BMTrainModelWrapper(model, sync="rank0")
    model(X)
    assert model.scale.tolist() == [[1.0] * 3, [2.0] * 3]
    assert model.turn.tolist() == [1 - 1j]


@on_ranks(2)
def test_values_that_a_file_a_state_dict_or_an_initialisation_replaces_may_differ(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "model.pt")
    if rank() == 0:
        torch.save(made().state_dict(), path)
    bmt_core.synchronize()
    for seed in (rank() + 1, 5):
        loaded = BMTrainModelWrapper(made(seed))
        bmt_checkpoint.load(loaded, path)
        loaded(X)
        filled = BMTrainModelWrapper(made(seed))
        for state in (made(seed), made()):
            filled.load_state_dict(state.state_dict())
        filled(X)
        reloaded = BMTrainModelWrapper(made(seed))
        reloaded.load_state_dict(made(seed).state_dict())
        bmt_checkpoint.load(reloaded, path)
        reloaded(X)
        torch.manual_seed(5)
        drawn = Linear(4, 3)
        init_parameters(drawn)
        drawn(X)
        copied = BMTrainModelWrapper(made())
        copy.deepcopy(copied)(X)


@on_ranks(2)
def test_values_of_parts_cannot_be_sent() -> None:
    model = made()
    Block(model.layers[0])
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.weight is sharded already, and sync='rank0' sends whole values",
    ):
        BMTrainModelWrapper(model, sync="rank0")
    with pytest.raises(ConfigError, match=r"^sync must be 'rank0' or None, not 'rank1'\.$"):
        BMTrainModelWrapper(made(), sync="rank1")  # type: ignore[arg-type]


def with_values_on_rank_0_alone() -> nn.Module:
    with torch.device("meta" if rank() else "cpu"):
        return nn.Linear(4, 3)


@on_ranks(4)
def test_a_model_with_values_on_rank_0_alone_may_load_and_cannot_send() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(4, 3)
    model = BMTrainModelWrapper(with_values_on_rank_0_alone(), init=False)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(X), plain(X))
    with pytest.raises(
        ConfigError,
        match=(
            r"weight has values on some ranks only \(rank 0 and rank 1 differ\), and sync='rank0'"
        ),
    ):
        BMTrainModelWrapper(with_values_on_rank_0_alone(), init=False, sync="rank0")
