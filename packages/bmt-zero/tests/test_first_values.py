"""Ranks that begin with different values find it out at the first call; ``sync="rank0"`` makes them alike."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import nn

import bmt_checkpoint
import bmt_core
from bmt_core import DistributedModule, DistributedParameter, init_parameters, rank
from bmt_core.errors import ConfigError
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper
from bmtrain.nn import Linear


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


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def said(call: Any) -> str:
    """The error of the first call."""
    with pytest.raises(ConfigError) as caught:
        call(torch.ones(2, 4))
    return str(caught.value)


def other_seeds() -> str:
    return said(BMTrainModelWrapper(made(bmt_core.rank())))


def one_layer_loaded_on_rank_0_only() -> str:
    model = made()
    if bmt_core.rank() == 0:
        nn.init.ones_(model.head.weight)
    return said(BMTrainModelWrapper(model))


def a_buffer() -> str:
    model = made()
    model.mean += bmt_core.rank()
    return said(BMTrainModelWrapper(model))


def a_buffer_in_a_block() -> str:
    model = made()
    model.layers[1].running_var.add_(bmt_core.rank())  # type: ignore[operator, union-attr]
    return said(BMTrainModelWrapper(model))


def a_block_without_a_wrapper() -> str:
    torch.manual_seed(bmt_core.rank())
    return said(Block(nn.Linear(4, 4)))


def a_state_on_rank_0_only_after_wrapping() -> str:
    model = BMTrainModelWrapper(made())
    if bmt_core.rank() == 0:
        model.load_state_dict(made(3).state_dict())
    return said(model)


def a_state_of_each_ranks_own() -> str:
    model = BMTrainModelWrapper(made())
    model.load_state_dict(made(bmt_core.rank()).state_dict())
    return said(model)


def a_write_of_rank_0_to_a_whole_parameter() -> str:
    model = BMTrainModelWrapper(made())
    with bmt_core.whole_parameters(model):
        if bmt_core.rank() == 0:
            nn.init.ones_(model.head.weight)
    return said(model)


def a_gathered_copy_filled_with_numbers_of_the_ranks_own() -> str:
    model = BMTrainModelWrapper(made())
    torch.manual_seed(bmt_core.rank())
    nn.init.normal_(model.head.weight)
    return said(model)


def numbers_of_the_ranks_own_by_init_parameters() -> str:
    torch.manual_seed(bmt_core.rank())
    layer = Linear(4, 3)
    init_parameters(layer)
    return said(layer)


def numbers_of_the_ranks_own_for_a_model_on_meta() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(bmt_core.rank())
    return said(BMTrainModelWrapper(model))


def a_parameter_made_by_hand() -> str:
    class Layer(DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.gain = DistributedParameter(torch.full((4,), float(bmt_core.rank())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    return said(Layer())


CASES = {
    other_seeds: "weight has other values on rank 1 than on rank 0.",
    one_layer_loaded_on_rank_0_only: "head.weight has other values on rank 1 than on rank 0.",
    a_buffer: "the buffer Model.mean has other values on rank 1 than on rank 0.",
    a_buffer_in_a_block: "the buffer BatchNorm1d.running_var has other values on rank 1",
    a_block_without_a_wrapper: "weight has other values on rank 1 than on rank 0.",
    a_state_on_rank_0_only_after_wrapping: "weight has other values on rank 1 than on rank 0.",
    a_state_of_each_ranks_own: "weight has other values on rank 1 than on rank 0.",
    a_write_of_rank_0_to_a_whole_parameter: "head.weight has other values on rank 1 than on rank 0.",
    a_gathered_copy_filled_with_numbers_of_the_ranks_own: "head.weight has other values on rank 1",
    numbers_of_the_ranks_own_by_init_parameters: "Linear.weight has other values on rank 1 than on rank 0.",
    numbers_of_the_ranks_own_for_a_model_on_meta: "weight has other values on rank 1 than on rank 0.",
    a_parameter_made_by_hand: "Layer.gain has other values on rank 1 than on rank 0.",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_begin_with_other_values_are_told_which(case: Any, ranks: int) -> None:
    for text in run_ranks(case, ranks):
        assert CASES[case] in text and "BMTrainModelWrapper(model, sync='rank0')" in text
        assert "A buffer that is to differ is set after wrapping" in text


def sent_by_rank_0() -> dict[str, torch.Tensor]:
    model = made(bmt_core.rank())
    model.mean += bmt_core.rank()
    BMTrainModelWrapper(model, sync="rank0")
    model(torch.ones(2, 4)).sum().backward()
    return {**model.state_dict(), "mean": model.mean}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0_sends_its_values_to_all(ranks: int) -> None:
    plain = made()
    plain(torch.ones(2, 4))  # moves the running mean
    for found in run_ranks(sent_by_rank_0, ranks):
        assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())


def own_buffers_after_wrapping() -> list[float]:
    model = BMTrainModelWrapper(made()).eval()
    model.mean = torch.full((4,), float(rank()))
    model.layers[1].running_mean.fill_(rank())  # type: ignore[union-attr, operator]
    model(torch.ones(2, 4))
    return [float(model.mean[0]), float(model.layers[1].running_mean[0])]  # type: ignore[index]


def test_a_buffer_of_a_ranks_own_is_set_after_wrapping() -> None:
    assert run_ranks(own_buffers_after_wrapping, 2) == [[0.0, 0.0], [1.0, 1.0]]


def an_expanded_buffer() -> list[float]:
    model = made()
    model.register_buffer("scale", torch.tensor([[bmt_core.rank() + 1.0], [2.0]]).expand(2, 3))
    BMTrainModelWrapper(model, sync="rank0")
    model(torch.ones(2, 4))
    return model.scale.flatten().tolist()  # type: ignore[no-any-return, operator, union-attr]


def test_an_expanded_buffer_is_sent_too() -> None:
    assert run_ranks(an_expanded_buffer, 2) == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2


def set_before_the_first_call(path: str) -> None:
    """Values that a file, a state_dict or an initialisation replaces may differ."""
    if bmt_core.rank() == 0:
        torch.save(made().state_dict(), path)
    bmt_core.synchronize()
    x = torch.ones(2, 4)
    for seed in (bmt_core.rank() + 1, 5):
        loaded = BMTrainModelWrapper(made(seed))
        bmt_checkpoint.load(loaded, path)
        loaded(x)
        filled = BMTrainModelWrapper(made(seed))
        for state in (made(seed), made()):
            filled.load_state_dict(state.state_dict())
        filled(x)
        reloaded = BMTrainModelWrapper(made(seed))
        reloaded.load_state_dict(made(seed).state_dict())
        bmt_checkpoint.load(reloaded, path)
        reloaded(x)
        torch.manual_seed(5)
        drawn = Linear(4, 3)
        init_parameters(drawn)
        drawn(x)
        copied = BMTrainModelWrapper(made())
        copy.deepcopy(copied)(x)


def test_values_that_are_replaced_before_the_first_call_may_differ(tmp_path: Any) -> None:
    run_ranks(set_before_the_first_call, 2, str(tmp_path / "model.pt"))


def sync_of_what_is_sharded() -> tuple[str, str]:
    model = made()
    Block(model.layers[0])
    with pytest.raises(ConfigError) as sharded:
        BMTrainModelWrapper(model, sync="rank0")
    with pytest.raises(ConfigError) as unknown:
        BMTrainModelWrapper(made(), sync="rank1")  # type: ignore[arg-type]
    return str(sharded.value), str(unknown.value)


def test_values_of_parts_cannot_be_sent() -> None:
    for sharded, unknown in run_ranks(sync_of_what_is_sharded, 2):
        assert sharded.startswith("layers.0.weight is sharded already, and sync='rank0' sends whole values.")
        assert unknown == "sync must be 'rank0' or None, not 'rank1'."


def partly_on_meta(sync: Literal["rank0"] | None) -> str | list[float]:
    """Wrap a model that has values on rank 0 only; what ranks load then is right, and ``sync`` is one clear error."""
    torch.manual_seed(1)
    values = nn.Linear(4, 3).state_dict()
    with torch.device("meta" if rank() else "cpu"):
        model = nn.Linear(4, 3)
    try:
        BMTrainModelWrapper(model, init=False, sync=sync)
        model.load_state_dict(values)
        return model(torch.ones(1, 4)).flatten().tolist()  # type: ignore[no-any-return]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_with_values_on_rank_0_alone_may_load_and_cannot_send(world_size: int) -> None:
    torch.manual_seed(1)
    expected = nn.Linear(4, 3)(torch.ones(1, 4)).flatten().tolist()
    assert run_ranks(partly_on_meta, world_size, None) == [pytest.approx(expected)] * world_size
    for message in run_ranks(partly_on_meta, world_size, "rank0"):
        assert "weight has values on some ranks only (rank 0 and rank 1 differ), and sync='rank0'" in message
