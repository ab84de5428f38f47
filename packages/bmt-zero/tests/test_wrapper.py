"""``BMTrainModelWrapper``: whole plain models become distributed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Model, batch, grads_of, loss_of

from bmt_core import ConfigError
from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedModule, DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Mixture(nn.Module):
    """A nested list, a parameter tied across two blocks, a buffer, a direct parameter, an
    unused one.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.layers[1].experts[0].weight = self.layers[0].experts[2].weight  # type: ignore[union-attr, index]
        self.bias = nn.Parameter(torch.zeros(4))
        self.lonely = nn.Parameter(torch.ones(3))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor
        return x + self.bias + self.bias * 2


@on_ranks(4)
def test_nested_lists_ties_across_blocks_and_buffers_train_like_plain_torch(
    world_size: int,
) -> None:
    plain, model = Mixture(), Mixture()
    assert (
        BMTrainModelWrapper(model) is model
        and isinstance(model, DistributedModule)
        and isinstance(model, Mixture)
    )
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert [isinstance(layer, Block) for layer in model.layers] == [True, True]
    assert not any(isinstance(e, Block) for layer in model.layers for e in layer.experts)  # type: ignore[union-attr]
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for module, own in ((plain, x), (model, x.chunk(world_size)[rank()])):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(own).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def seeded_model() -> Any:
    torch.manual_seed(0)
    return Model()


@on_ranks(2)
def test_parameters_are_found_by_name() -> None:
    model = BMTrainModelWrapper(Model())
    assert all(
        model.get_parameter(name) is parameter for name, parameter in model.named_parameters()
    )


@on_ranks(2)
def test_a_model_that_is_compiled_as_a_whole_has_the_gradients_of_plain_torch() -> None:
    plain, model = seeded_model(), BMTrainModelWrapper(seeded_model())
    for call in (plain, torch.compile(model, backend="aot_eager")):
        for step in range(2):
            tokens, targets = batch(step)
            loss_of(call(tokens), targets).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain, times=2), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_sparse_gradients_outside_of_blocks_are_reduced_dense() -> None:
    model = BMTrainModelWrapper(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    model(torch.tensor([1, 1, 4])).sum().backward()
    assert grads_of(model)["0.weight"].sum(1).tolist() == [0.0, 8.0, 0.0, 0.0, 4.0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 8, bias=False)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden).square().sum()


def train_words(model: nn.Module, ids: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


@on_ranks(4)
@cells("steps_before", [0, 1])
def test_weights_tied_after_wrapping_train_as_one(steps_before: int) -> None:
    plain, model = Words(), BMTrainModelWrapper(Words())
    ids = torch.arange(8)
    own = ids.chunk(world_size())[rank()]
    train_words(plain, ids, steps_before)
    plain.head.weight = plain.embedding.weight
    train_words(plain, ids, 2)
    train_words(model, own, steps_before)
    model.head.weight = model.get_parameter("embedding.weight")
    train_words(model, own, 2)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(4)
@cells("steps_before", [0, 1])
def test_tying_what_was_gathered_after_wrapping_says_the_way(steps_before: int) -> None:
    model = BMTrainModelWrapper(Words())
    train_words(model, torch.arange(8).chunk(world_size())[rank()], steps_before)
    with pytest.raises(
        TypeError,
        match=r"Linear\.weight is a parameter.*model\.get_parameter\('embedding\.weight'\)",
    ):
        model.head.weight = model.embedding.weight
    with pytest.raises(
        ConfigError, match="tie it before BMTrainModelWrapper wraps the whole model"
    ):
        model.layers[1].weight = model.layers[0].weight
        model(torch.arange(2))
