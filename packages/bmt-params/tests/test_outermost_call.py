"""Parameters outside of Blocks, which bmt-params alone gathers one by one, each once per call of
the outermost module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, rank, world_size
from bmt_params import DistributedModule, DistributedParameter
from bmt_params.models_of_run import ModelsOfRun
from bmt_params.modules.distributed_module import extend
from bmt_params.owner import owner_of
from bmt_testing import run_ranks


class Model(nn.Module):
    """Sizes that no number of ranks divides; the first layer is used twice, and
    ``unused`` never.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3, bias=False)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.first(x)))  # type: ignore[no-any-return]


def sharded(plain: nn.Module) -> nn.Module:
    for module in plain.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = DistributedParameter(parameter.data)
        extend(module, DistributedModule)
    return plain


def trained(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for part in batch.chunk(2):
            model(part).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters: list[Any] = list(model.parameters())
    return [
        p.gather_like(p.detach()) if isinstance(p, DistributedParameter) else p.detach()
        for p in parameters
    ]


def trained_on_ranks() -> tuple[list[torch.Tensor], bool]:
    """The parameters, and whether nobody has gathered them together."""
    model = sharded(Model())
    halves = torch.arange(40.0).view(8, 5).div(40).chunk(2)
    own = torch.cat([half.chunk(world_size())[rank()] for half in halves])
    return trained(model, own), all(owner_of(p) is None for p in model.parameters())


def test_training_equals_plain_torch() -> None:
    expected = trained(Model(), torch.arange(40.0).view(8, 5).div(40))
    for parameters, are_alone in run_ranks(trained_on_ranks, 4):
        assert are_alone
        torch.testing.assert_close(parameters, expected)


def gathers() -> list[int]:
    """How many gathers a call makes, and one in which each mode reads everything, and calls of
    parts of the model.
    """
    model, counts, count = sharded(Model()), [], 0
    real = DistributedParameter.gather

    def counted(self: DistributedParameter, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal count
        count += 1
        return real(self, dtype)

    def in_two_modes(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        with torch.no_grad():
            model.last(model.first(*args))

    DistributedParameter.gather = counted  # type: ignore[method-assign]
    try:
        model(torch.ones(2, 5))
        counts.append(count)
        handle = model.register_forward_hook(in_two_modes)
        model(torch.ones(2, 5))
        handle.remove()
        counts.append(count)
        for _ in range(2):
            model.first(torch.ones(2, 5))
        counts.append(count)
    finally:
        DistributedParameter.gather = real  # type: ignore[method-assign]
    return counts


def test_a_parameter_is_gathered_once_per_outermost_call_and_mode() -> None:
    # Of three parameters that are read: 3, then 3 for autograd and 3 without it, then 2 for each
    # call of a layer.
    assert run_ranks(gathers, 2) == [[3, 9, 13]] * 2


def compiled_operations() -> list[str]:
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch.compile(sharded(Model()), backend=backend)(torch.ones(2, 5))
    return found


def test_a_compiled_model_has_no_operations_of_the_calls_own() -> None:
    (operations,) = run_ranks(compiled_operations, 1)
    assert not [name for name in operations if "transforms" in name]


def ends_of_a_refused_call() -> list[Any]:
    model, ends = sharded(Model()), list[Any]()

    def refuse(module: nn.Module) -> Any:
        raise ConfigError("refused")

    current().state(ModelsOfRun).at_calls += [lambda module: ends.append, refuse]
    with pytest.raises(ConfigError, match="refused"):
        model(torch.ones(2, 5))
    return ends


def test_a_call_that_is_refused_as_it_begins_ends_for_all_who_saw_it_begin() -> None:
    assert run_ranks(ends_of_a_refused_call, 1, own_run=True) == [[None]]
