"""Collectives of ``torch.distributed`` on parts of parameters or gradients are one clear error on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce  # by name, before a run has started

from bmt_core import ConfigError
from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedParameter, whole_parameters
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper

# With a head of 7 x 5, no number of ranks has equal parts, and in the bias of 1 most ranks
# have nothing.
SHAPES = {
    "layers.0.weight": (5, 5),
    "head.weight": (7, 5),
    "scale.weight": (1, 7),
    "scale.bias": (1,),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head, self.scale = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        scaled: torch.Tensor = self.scale(self.head(x))
        return scaled


ON_GRADIENTS: list[Callable[[torch.Tensor], Any]] = [
    dist.all_reduce,
    lambda grad: all_reduce(grad.data, op=dist.ReduceOp.SUM),
    lambda grad: dist.all_reduce(grad.view(-1), async_op=True),
    lambda grad: dist.broadcast(grad, 0),
    lambda grad: dist.all_gather([torch.empty_like(grad) for _ in range(world_size())], grad),
    lambda grad: dist.reduce(grad, 0),
]
ON_VALUES: list[Callable[[torch.Tensor], Any]] = [
    lambda p: dist.broadcast(p, 0),
    lambda p: dist.broadcast(p.data, 0),
    lambda p: dist.broadcast(p.data.detach(), src=0),
    lambda p: dist.all_reduce(p.data),
    lambda p: dist.all_gather([torch.empty(9) for _ in range(world_size())], p.data),
    lambda p: dist.all_gather_into_tensor(torch.empty(99), p.data),
    lambda p: dist.send(p.data, 1 - rank()) if rank() < 2 else dist.all_reduce(p.data),
]


@on_ranks(4)
def test_collectives_on_parts_are_refused_on_every_rank_and_change_nothing() -> None:
    plain, model = Model(), BMTrainModelWrapper(Model())
    inputs = [torch.full((2, 5), each + 1.0) for each in range(world_size())]
    for module, x in ((plain, torch.cat(inputs)), (model, inputs[rank()])):
        (module(x).sum() / world_size()).backward()
    kept = [(part.detach().clone(), part.grad.clone()) for part in model.parameters()]
    for name, part in model.named_parameters():
        if name not in SHAPES:
            continue
        for call in ON_GRADIENTS:
            with pytest.raises(ConfigError) as caught:
                call(part.grad)
            said = str(caught.value)
            assert (
                f"this rank's gradient of {name} of shape {SHAPES[name]}. bmt has summed it" in said
            )
            assert 'gradients="mean"' in said and "grad.clone()" in said
        for call in ON_VALUES:
            with pytest.raises(ConfigError) as caught:
                call(part)
            said = str(caught.value)
            assert f"this rank's part of {name} of shape {SHAPES[name]}" in said
            assert 'sync="rank0"' in said and "whole_parameters" in said
    for part, (value, grad) in zip(model.parameters(), kept, strict=True):
        assert torch.equal(part.detach(), value) and torch.equal(part.grad, grad)
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(2)
def test_other_tensors_and_whole_parameters_may_be_given_to_collectives() -> None:
    """What is right, or said to be meant: ordinary tensors, copies, the part itself, whole
    parameters, equal replicas.
    """
    model, plain = BMTrainModelWrapper(Model()), nn.Linear(2, 2)
    replicated = Block(nn.Linear(4, 4), zero_level=0)
    for module, width in ((model, 5), (plain, 2), (replicated, 4)):
        module(torch.ones(2, width)).sum().backward()
    weight = dict(model.named_parameters())["layers.0.weight"]
    assert plain.weight.grad is not None
    plain.weight.grad.fill_(rank())
    dist.all_reduce(plain.weight.grad)
    dist.broadcast(plain.weight.data, 0)
    dist.broadcast(replicated.weight.data, 0)
    dist.all_reduce(torch.ones(1).to_sparse())
    dist.all_reduce(weight.grad.square().sum())
    numbers = torch.zeros(64)
    numbers[: weight.numel()] = weight.detach()
    dist.all_reduce(numbers)
    part = DistributedParameter(torch.zeros(4))
    dist.broadcast(part.detach(), 0)  # of two elements on each rank
    with whole_parameters(model.head):
        dist.broadcast(model.head.weight.data, 0)
    assert plain.weight.grad.eq(1.0).all() and weight.gather().shape == (5, 5)


@on_ranks(2)
def test_a_replicated_gradient_that_was_summed_already_is_not_summed_again() -> None:
    block = Block(nn.Linear(4, 4), zero_level=0)
    block(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigError, match="bmt has summed it over the ranks"):
        dist.all_reduce(block.weight.grad)
