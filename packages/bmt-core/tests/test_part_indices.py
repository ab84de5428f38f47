"""Indices into parts of parameters: they raise where they would select other elements than of the
whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core import ConfigError, DistributedModule, DistributedParameter, whole_parameters
from bmt_core.run.runtime import world_size
from bmt_testing import run_ranks


class Layer(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.arange(2400.0).view(600, 4))
        self.bias = DistributedParameter(torch.arange(3.0))


INDICES: list[Callable[[Any], Any]] = [
    lambda p: p.data[0].zero_(),
    lambda p: p.data[0],
    lambda p: p[0],
    lambda p: p.data[:2].zero_(),
    lambda p: p.data.__setitem__(0, 5.0),
    lambda p: p.__setitem__(slice(0, 2), 5.0),
    lambda p: p.data.__setitem__(torch.tensor([0, 1]), 5.0),
    lambda p: p.data.detach()[0].zero_(),
    lambda p: list(p.data),
    lambda p: [row.zero_() for row in p],
]


def indices() -> dict[str, list[str]]:
    """What is said of indices into a matrix's part and into a vector's, which on one rank is
    the vector.
    """
    layer, said = Layer(), {}
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, DistributedParameter)
        before = parameter.detach().clone()
        if parameter.is_indexable:
            assert parameter.full_shape == (3,) and world_size() == 1
            assert parameter.data[0] == 0 and parameter[2] == 2
            continue
        said[name] = []
        for index in INDICES:
            with torch.no_grad(), pytest.raises(ConfigError) as raised:
                index(parameter)
            said[name].append(str(raised.value))
        assert torch.equal(parameter.detach(), before)
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_index_into_a_part_raises_and_names_the_parameter(ranks: int) -> None:
    for said in run_ranks(indices, ranks):
        assert len(said) == ranks
        assert all("into Layer.weight of shape (600, 4) would" in text for text in said["weight"])
        assert all("whole_parameters(module)" in text for text in said["weight"])


def right_ones() -> None:
    """What is right for a part stays: fills, masks, printing, and everything while the parameter
    is whole.
    """
    layer = Layer()
    part = layer.get_parameter("weight")
    with torch.no_grad():
        part.data[part.data > 100] = 100.0
        part.data[:] = part.data[...] + 1
        part[part == 101] = 7.0
        assert part.data[None].shape == (1, part.numel())
    assert repr(part.data) == repr(part.detach()) and "..." in repr(part.data)
    parameter = nn.Parameter(part.data)
    assert torch.equal(parameter, part)
    with whole_parameters(layer):
        layer.weight.data[0].zero_()
        assert len(list(layer.weight)) == 600
        torch.manual_seed(0)
        layer.weight.data[1].normal_()
        nn.init.normal_(layer.bias.data)
        layer.bias.data[0] = 3.0
    expected = torch.arange(2400.0).clamp(max=100.0).add(1).view(600, 4)
    expected[expected == 101] = 7.0
    expected[0] = 0
    torch.manual_seed(0)
    expected[1].normal_()
    bias = torch.zeros(3).normal_()
    bias[0] = 3.0
    torch.testing.assert_close(dict(layer.state_dict()), {"weight": expected, "bias": bias})


@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_whole_parts_and_indices_of_whole_parameters_are_right(ranks: int) -> None:
    run_ranks(right_ones, ranks)
