"""``TransformerBlockList``: the list, and what flows through it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Layer, grads_of

from bmt_core.run.runtime import init_distributed, rank
from bmt_testing import on_ranks
from bmt_zero import Block, TransformerBlockList


class Two(nn.Module):
    """Two hidden states, a positional and a keyword argument, one output more than is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, factor: float, *, shift: float = 0.0
    ) -> Any:
        return self.linear(a) * factor, b + a + shift, "extra"


@on_ranks(2)
def test_it_is_a_list() -> None:
    members = [Layer(6, 9) for _ in range(4)]
    blocks = TransformerBlockList(member for member in members)
    assert len(blocks) == 4
    assert all(isinstance(block, Block) for block in blocks)
    assert blocks[-1] is members[-1] and blocks["1"] is members[1]
    assert blocks[1:3] == members[1:3]
    assert list(blocks) == members
    assert "norm.weight" in {key.split(".", 1)[1] for key in blocks.state_dict()}
    assert repr(blocks).count("Block[Layer]") == 4
    with pytest.raises(IndexError):
        blocks[4]
    twice = Block(Layer(6, 9))
    with pytest.raises(AssertionError, match="twice"):
        TransformerBlockList([twice, twice])


@on_ranks(2)
def test_hidden_states_flow_and_are_returned() -> None:
    torch.manual_seed(0)
    members = [Two() for _ in range(3)]
    a, b = torch.ones(2, 4), torch.zeros(2, 4)
    expected_inputs = []
    h: Any = (a, b)
    with torch.no_grad():
        for member in members:
            expected_inputs.append(h)
            h = member(*h, 0.5, shift=1.0)[:2]
    blocks = TransformerBlockList(members, num_hidden=2)
    torch.testing.assert_close(blocks(a, b, 0.5, shift=1.0), h)
    out = blocks(a, b, 0.5, shift=1.0, return_hidden_states=True)
    assert isinstance(out, tuple) and len(out) == 4
    torch.testing.assert_close(out[:2], h)
    for index in range(2):
        torch.testing.assert_close(
            out[2 + index], torch.stack([states[index] for states in expected_inputs])
        )
    sum(part.sum() for part in out).backward()
    looped: Any = (a, b)
    for block in blocks:
        looped = block(*looped, 0.5, shift=1.0)[:2]
    torch.testing.assert_close(looped, h)


@on_ranks(2)
def test_empty_single_and_wrong_lists() -> None:
    empty = TransformerBlockList([])
    x = torch.ones(2, 6)
    assert len(empty) == 0 and empty(x) is x
    one = TransformerBlockList([Layer(6, 9)])
    assert one(x).shape == x.shape
    hidden, states = one(x, return_hidden_states=True)
    assert states.shape == (1, 2, 6) and hidden.shape == x.shape
    with pytest.raises(TypeError, match="passes 1 hidden state"):
        one(x=x)
    with pytest.raises(ValueError, match="returned Tensor where the list passes 2 hidden states"):
        TransformerBlockList([nn.Bilinear(6, 6, 6)], num_hidden=2)(x, x)
    with pytest.raises(ValueError, match="num_hidden must be at least 1"):
        TransformerBlockList([], num_hidden=0)


@on_ranks(2, init=None)
@pytest.mark.parametrize("level", [0, 3])
def test_same_module_twice_in_a_list_shares_parameters_and_gradients(level: int) -> None:
    init_distributed(device="cpu", zero_level=level)
    torch.manual_seed(0)
    layer, between = Layer(6, 9), Layer(6, 9)
    plain = copy.deepcopy(nn.Sequential(layer, between, layer))
    blocks = TransformerBlockList([layer, between, layer])
    assert len(blocks) == 3 and blocks[0] is blocks[2] is layer
    assert len(list(blocks.parameters())) == len(list(plain.parameters()))
    batches = torch.randn(2, 4, 3, 6, generator=torch.Generator().manual_seed(0))
    plain(batches).square().sum().backward()
    blocks(batches[rank()]).square().sum().backward()
    torch.testing.assert_close(grads_of(blocks), grads_of(plain))
