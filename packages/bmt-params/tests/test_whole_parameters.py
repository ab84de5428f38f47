"""``whole_parameters``: code outside of forward and backward reads and writes whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core import ConfigError
from bmt_params import DistributedModule, DistributedParameter, whole_parameters
from bmt_testing import run_ranks


class Layer(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.arange(15.0).view(3, 5))
        self.bias = DistributedParameter(torch.zeros(1))  # of which only one rank has a part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def used() -> dict[str, Any]:
    layer = Layer()
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None and bias is not None
    versions = bias._version
    with whole_parameters(layer):
        assert layer.weight is weight and layer.weight.shape == (3, 5)
        with whole_parameters(layer):  # which changes nothing
            nn.init.constant_(layer.weight[1], 7.0)
        layer.weight.data = layer.weight.data * 2  # other memory
        call = message_of(lambda: layer(torch.ones(3)))
        copied = copy.deepcopy(layer).weight
        assert type(copied) is nn.Parameter and torch.equal(copied, layer.weight)
        again = nn.Parameter(layer.weight)  # as torch's parametrizations do
        assert isinstance(again, nn.Parameter) and again.data_ptr() == layer.weight.data_ptr()
    assert bias._version == versions  # nobody wrote to it
    found = {
        "state": {key: value.clone() for key, value in layer.state_dict().items()},
        "call": call,
    }

    def fails() -> None:
        with whole_parameters(layer):
            nn.init.zeros_(layer.weight)
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        fails()

    def reshapes() -> None:
        with whole_parameters(layer):
            layer.weight.data = torch.zeros(5, 5)

    found["reshaped"] = message_of(reshapes)
    torch.testing.assert_close(dict(layer.state_dict()), found["state"])
    assert weight.dim() == 1

    layer.register_forward_pre_hook(lambda module, args: whole_parameters(layer).__enter__())
    found["inside"] = message_of(lambda: layer(torch.ones(3)))

    with torch.device("meta"):
        empty = Layer()
    found["empty"] = message_of(lambda: whole_parameters(empty).__enter__())
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_inside_stays_and_what_goes_wrong_changes_nothing(world_size: int) -> None:
    expected = torch.arange(15.0).view(3, 5)
    expected[1] = 7
    for found in run_ranks(used, world_size):
        torch.testing.assert_close(found["state"], {"weight": expected * 2, "bias": torch.zeros(1)})
        assert "called inside whole_parameters()" in found["call"]
        assert "weight (5, 5) instead of (3, 5)" in found["reshaped"]
        assert "inside a forward" in found["inside"]
        assert found["empty"].startswith("Parameters weight, bias have no values yet")
