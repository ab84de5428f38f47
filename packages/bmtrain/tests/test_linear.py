"""bmt's linear layer on its own, compared with torch's."""

from __future__ import annotations

import torch
from torch import nn

from bmt_core.run.runtime import rank
from bmt_params.init.parameter_init import init_parameters
from bmt_testing import run_ranks
from bmtrain.nn import Linear, OpLinear

BATCHES = torch.arange(24.0).view(2, 2, 2, 3) / 10


def trained() -> list[torch.Tensor]:
    layer = Linear(3, 5)
    init_parameters(layer)
    state = [layer.weight.detach(), layer.bias.detach()]  # type: ignore[union-attr]
    out = layer(BATCHES[rank()])
    out.square().sum().backward()
    assert out.equal(OpLinear.apply(BATCHES[rank()], *state))
    double = Linear(3, 5, bias=False, dtype=torch.float64)
    init_parameters(double)
    assert double(BATCHES[0].double()).shape == (2, 2, 5)
    assert repr(layer) == "Linear(in_features=3, out_features=5, bias=True)"
    parameters = [layer._parameters["weight"], layer._parameters["bias"]]
    return [*state, *(parameter.gather_like(parameter.grad) for parameter in parameters)]  # type: ignore[union-attr, operator]


def test_values_and_gradients_are_those_of_torchs_layer() -> None:
    torch.manual_seed(3)
    expected = nn.Linear(3, 5)
    torch.manual_seed(3)
    nn.init.xavier_normal_(expected.weight)
    nn.init.zeros_(expected.bias)
    expected(BATCHES).square().sum().backward()
    for found in run_ranks(trained, 2, init={"seed": 3}):
        torch.testing.assert_close(
            found,
            [expected.weight, expected.bias, expected.weight.grad, expected.bias.grad],
            check_stride=False,
        )
