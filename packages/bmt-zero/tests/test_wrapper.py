"""``BMTrainModelWrapper``: whole plain models become distributed in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Model, batch, full_gradient, loss_of, plain, train

from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_core.testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Mixture(nn.Module):
    """A nested list, a parameter tied across two blocks, a buffer, a direct parameter, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.layers[1].experts[0].weight = self.layers[0].experts[2].weight  # type: ignore[union-attr, index]
        self.bias = nn.Parameter(torch.zeros(4))
        self.lonely = nn.Parameter(torch.ones(3))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor
        return x + self.bias + self.bias * 2


def wrapped() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Mixture()
    names = [name for name, _ in model.named_parameters()]
    values = copy.deepcopy(model.state_dict())
    same = BMTrainModelWrapper(model)
    assert same is model and isinstance(model, DistributedModule) and isinstance(model, Mixture)
    assert all(isinstance(p, DistributedParameter) for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == names
    assert [isinstance(layer, Block) for layer in model.layers] == [True, True]
    assert not any(isinstance(e, Block) for layer in model.layers for e in layer.experts)  # type: ignore[union-attr]
    torch.testing.assert_close(dict(model.state_dict()), dict(values))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 16).view(4, 4).chunk(runtime.world_size())[runtime.rank()]
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nested_lists_ties_across_blocks_and_buffers_train_like_plain_torch(world_size: int) -> None:
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 16).view(4, 4)).square().sum().backward()
        optimizer.step()
    for state in run_ranks(wrapped, world_size):
        torch.testing.assert_close(state, dict(model.state_dict()))


def wrapped_loss() -> Any:
    model = BMTrainModelWrapper(Model())
    assert model.head.weight.shape == (11, 7)  # gathered when read
    assert model._parameters == {} and model.head._parameters["weight"] is model.embedding._parameters["weight"]
    return train(model, 5, lambda part: part)


def test_a_whole_model_with_tied_embedding_equals_plain_torch() -> None:
    expected = plain()
    for result in run_ranks(wrapped_loss, 1):
        torch.testing.assert_close(result["state"], dict(expected["state"]))
        torch.testing.assert_close(result["loss"], expected["loss"])


def copied() -> None:
    model = BMTrainModelWrapper(Model())
    twin = copy.deepcopy(model)
    tokens, targets = batch(0)
    torch.testing.assert_close(twin(tokens), model(tokens))
    loss_of(twin(tokens), targets).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_a_wrapped_model_can_be_copied() -> None:
    run_ranks(copied, 2)


def found_by_name() -> bool:
    model = BMTrainModelWrapper(Model())
    return all(model.get_parameter(name) is parameter for name, parameter in model.named_parameters())


def test_parameters_are_found_by_name() -> None:
    assert run_ranks(found_by_name, 2) == [True, True]


def gradients(model: nn.Module, compiled: Callable[..., torch.Tensor]) -> list[Any]:
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(compiled(tokens), targets).backward()
    return [full_gradient(parameter) for parameter in model.parameters()]


def compiled_as_a_whole() -> list[Any]:
    torch.manual_seed(0)
    model = BMTrainModelWrapper(Model())
    return gradients(model, torch.compile(model, backend="aot_eager"))


def test_a_model_that_is_compiled_as_a_whole_has_the_gradients_of_plain_torch() -> None:
    torch.manual_seed(0)
    model = Model()
    expected = [2 * grad for grad in gradients(model, model)]
    for found in run_ranks(compiled_as_a_whole, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
