"""Operations on parts of parameters: they raise where they would give another result than on the
whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core import ConfigError
from bmt_core.run.runtime import world_size
from bmt_params import DistributedModule, DistributedParameter, whole_parameters
from bmt_testing import on_ranks, run_ranks


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


@on_ranks(2)
def test_masks_whole_parts_and_indices_of_whole_parameters_are_right() -> None:
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


W = torch.ones(600, 4)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "@": lambda p: p @ torch.ones(4),
    "@ of another": lambda p: torch.ones(3, 600) @ p,
    "mm": lambda p: torch.mm(p, W.t()),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "mT": lambda p: p.mT,
    "transpose": lambda p: torch.transpose(p, 0, 1),
    "permute": lambda p: p.permute(1, 0),
    "norm": lambda p: p.norm(dim=1),
    "torch.norm": lambda p: torch.norm(p, 2, 1),
    "linalg.norm": lambda p: torch.linalg.norm(p, ord=2),
    "svd": lambda p: torch.linalg.svd(p),
    "sum over rows": lambda p: p.sum(0),
    "mean over columns": lambda p: torch.mean(p, dim=-1),
    "largest of each row": lambda p: p.amax(dim=1),
    "softmax": lambda p: p.softmax(-1),
    "F.softmax": lambda p: nn.functional.softmax(p, dim=-1),
    "normalize": lambda p: nn.functional.normalize(p),
    "cosine": lambda p: torch.cosine_similarity(p, p.detach(), dim=0),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 4), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "sort": lambda p: torch.sort(p, 0),
    "times rows": lambda p: torch.ones(600, 4) * p,
    "plus a row": lambda p: p.add_(torch.ones(4)),
    "copy of the whole": lambda p: p.copy_(W),
    "cut": lambda p: p.narrow(0, 0, 2),
}


def parts_of(layer: Layer) -> list[Any]:
    weight: Any = layer.get_parameter("weight")
    return [weight, weight.data]


def refusal(operation: Callable[[Any], Any], part: Any) -> str:
    try:
        with torch.no_grad():
            operation(part)
    except ConfigError as error:
        return str(error)
    return "it was computed"


@on_ranks(1, 2)
def test_an_operation_that_needs_the_whole_raises_and_names_the_remedy() -> None:
    for name, operation in OPERATIONS.items():
        layer = Layer()
        before = layer.get_parameter("weight").detach().clone()
        for part in parts_of(layer):
            said = refusal(operation, part)
            assert "Layer.weight of shape (600, 4)" in said, name
            assert "whole_parameters(module)" in said, name
        assert torch.equal(layer.get_parameter("weight").detach(), before), name
        with whole_parameters(layer), torch.no_grad():
            operation(layer.weight)


@on_ranks(1, 2)
def test_a_total_is_right_where_a_rank_has_all_elements() -> None:
    totals: list[Callable[[Any], torch.Tensor]] = [
        torch.sum,
        torch.norm,
        lambda p: p.norm(1),
        lambda p: p.mean(),
        torch.linalg.vector_norm,
        lambda p: torch._foreach_norm([p])[0],
        lambda p: p.max(),
    ]
    for part in parts_of(Layer()):
        for total in totals:
            if world_size() == 1:
                whole = torch.arange(2400.0).view(600, 4)
                torch.testing.assert_close(total(part), total(whole))
            else:
                with pytest.raises(ConfigError, match="not with the whole"):
                    total(part)


@on_ranks(2)
def test_elementwise_operations_and_those_of_a_step_are_right_for_a_part() -> None:
    layer = Layer()
    parameter = layer.get_parameter("weight")
    assert isinstance(parameter, nn.Parameter) and parameter is layer._parameters["weight"]
    part = parameter.detach()
    with torch.no_grad():
        for p in parts_of(layer):
            assert type(p * 2) is torch.Tensor and torch.equal(p * 2, part * 2)
            assert torch.equal(torch.where(p > 3, p, part), part)
            assert torch.equal(p.clone().lerp_(p, 0.5), part)
            p.mul_(1.0).add_(torch.ones_like(p)).sub_(torch.tensor([1.0])).clamp_(0)
    assert torch.equal(parameter.detach(), part)
    parameter.requires_grad_(False).requires_grad_(True)
    (parameter * part.clone()).sum().backward()
    assert parameter.grad is not None and torch.equal(parameter.grad, part)

    class Logged(torch.optim.SGD):
        bmt_elementwise = True
        norms: list[torch.Tensor] = []

        def step(self, closure: Any = None) -> Any:
            self.norms.append(parameter.norm())  # of the part, and it does not decide anything
            return super().step(closure)

    expected = part.norm()
    Logged([parameter], lr=0.1).step()
    assert torch.equal(Logged.norms[0], expected)
    with pytest.raises(ConfigError, match=r"^t\(\) would"):
        parameter.t()
