"""Copies and pickles of Blocks and wrapped models train on their own, and copying moves nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zero_models import Layer, X, line

from bmt_params import DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


def unpickled(module: Any) -> Any:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
@cells("copied", [copy.deepcopy, unpickled])
def test_copies_and_pickles_are_independent_working_blocks(copied: Callable[[Any], Any]) -> None:
    block = Block(Layer(6, 9), zero_level=3)
    block._zero_level, block._use_checkpoint = 2, False
    x = torch.linspace(-1, 1, 12).view(2, 6)
    twin = copied(block)
    expected = block(x)
    assert (
        isinstance(twin, Block)
        and isinstance(twin, Layer)
        and twin._zero_level == 2
        and not twin._use_checkpoint
    )
    assert all(isinstance(parameter, DistributedParameter) for parameter in twin.parameters())
    assert twin.up.weight is twin.gate.weight
    torch.testing.assert_close(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(block(x), expected)  # the original is untouched
    torch.testing.assert_close(twin(x), x)
    twin(x).sum().backward()


@on_ranks(2)
def test_a_copy_has_the_same_parts_also_if_a_parameter_was_frozen_since() -> None:
    block = Block(nn.Linear(300, 3))
    block.bias.requires_grad_(False)
    block(torch.ones(2, 300))
    twin = copy.deepcopy(block)
    twin(torch.ones(2, 300))
    assert [p.shape for p in twin.parameters()] == [p.shape for p in block.parameters()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([line(), line()])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


@on_ranks(2)
def test_copies_keep_ties_across_blocks_and_survive_inference_mode() -> None:
    model = BMTrainModelWrapper(Tied())
    twin = copy.deepcopy(model)
    assert twin(X).tolist() == model(X).tolist() == [[4.0, 4.0]]
    late = copy.deepcopy(model)
    with torch.inference_mode():  # its first call, which lays it out
        late(X)
    late(X).sum().backward()
    assert all(parameter.grad is not None for parameter in late.parameters())


@on_ranks(4, timeout=30)
def test_a_copy_and_its_original_laid_out_again_train_alike_though_parts_are_empty() -> None:
    block = Block(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    block(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    block.bias.requires_grad_(False)
    block.weight.data = block.weight.data.clone()
    twin, of_twin = copy.deepcopy((block, optimizer))
    for module, stepping in ((block, optimizer), (twin, of_twin)):
        stepping.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        stepping.step()
    torch.testing.assert_close(dict(block.state_dict()), dict(twin.state_dict()))
