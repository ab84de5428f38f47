"""Groups by weight decay: of sharded parameters the same as of ordinary ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_optim import AdamW, OptimManager, param_groups


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Module(), nn.Module()
        self.embedding.weight = self.tied = make(torch.ones(7, 3))
        self.norm.weight, self.scale, self.matrix = make(torch.ones(3)), make(torch.ones(())), make(torch.ones(3, 1))


def _names(groups: list[dict[str, Any]], model: Model) -> list[tuple[float, list[str]]]:
    names = {p: name for name, p in model.named_parameters()}
    return [(group["weight_decay"], sorted(names[p] for p in group["params"])) for group in groups]


def _groups_and_warnings() -> tuple[Any, Any, list[list[str]]]:
    model = Model(DistributedParameter)
    chosen = param_groups(model, weight_decay=0.1)
    exempt = param_groups(model, weight_decay=0.1, no_decay=("embedding.*", "no such"))
    by_slices = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == is_matrix]} for is_matrix in (True, False)
    ]
    texts = []
    for groups in (chosen, exempt, by_slices):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            OptimManager().add_optimizer(AdamW(groups))
        texts.append([str(warning.message) for warning in caught])
    with warnings.catch_warnings(record=True) as caught:  # a loop without a manager
        warnings.simplefilter("always")
        model.matrix.gather().sum().backward()
        for _ in range(2):
            torch.optim.SGD(by_slices, lr=0.1).step()
    texts.append([str(warning.message) for warning in caught if "sums over" not in str(warning.message)])
    return _names(chosen, model), _names(exempt, model), texts


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_are_those_of_whole_parameters(run_ranks: Any, world_size: int) -> None:
    model = Model(nn.Parameter)
    assert not runtime.is_initialized()
    expected = _names(param_groups(model, weight_decay=0.1), model)
    assert expected == [(0.1, ["matrix", "tied"]), (0.0, ["norm.weight", "scale"])]
    for rank, (chosen, exempt, texts) in enumerate(run_ranks(_groups_and_warnings, world_size)):
        assert chosen == expected
        assert exempt == [(0.1, ["matrix"]), (0.0, ["norm.weight", "scale", "tied"])]  # by its other name
        assert texts[:2] == [[], []] and len(texts[2]) == len(texts[3]) == (1 if rank == 0 else 0)
        assert all("bmt.optim.param_groups(model" in text for text in [*texts[2], *texts[3]])


def test_one_pattern_alone_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass \('\*norm\*',\)"):
        param_groups(nn.Linear(1, 1), weight_decay=0.1, no_decay="*norm*")


@pytest.mark.parametrize("pattern", ["tied", "embedding.*"])
def test_a_tied_parameter_is_exempt_by_any_of_its_names(pattern: str) -> None:
    model = Model(nn.Parameter)
    found = _names(param_groups(model, weight_decay=0.1, no_decay=(pattern,)), model)
    assert found == [(0.1, ["matrix"]), (0.0, ["norm.weight", "scale", "tied"])]
