"""Groups by weight decay: of sharded parameters the same as of ordinary ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core import rank
from bmt_core.errors import ConfigError
from bmt_optim import AdamW, OptimManager, param_groups
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Module(), nn.Module()
        self.embedding.weight = self.tied = make(torch.ones(7, 3))
        self.norm.weight, self.scale, self.matrix = (
            make(torch.ones(3)),
            make(torch.ones(())),
            make(torch.ones(3, 1)),
        )


def _names(groups: list[dict[str, Any]], model: Model) -> list[tuple[float, list[str]]]:
    names = {p: name for name, p in model.named_parameters()}
    return [(group["weight_decay"], sorted(names[p] for p in group["params"])) for group in groups]


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def _by_dims(
    parameters: list[nn.Parameter], dims_of: Callable[[nn.Parameter], int]
) -> list[dict[str, Any]]:
    """Groups as scripts make them, with ``weight_decay`` of the optimizer for matrices."""
    matrices, vectors = (
        [p for p in parameters if (dims_of(p) >= 2) == is_matrix] for is_matrix in (True, False)
    )
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _by_slices(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return _by_dims(parameters, lambda p: p.dim())


@on_ranks(2)
def test_groups_are_those_of_whole_parameters_and_groups_by_dim_are_refused() -> None:
    plain = Model(nn.Parameter)
    expected = _names(param_groups(plain, weight_decay=0.1), plain)
    assert expected == [(0.1, ["matrix", "tied"]), (0.0, ["norm.weight", "scale"])]
    model = Model(DistributedParameter)
    # An ordinary matrix decays, beside sharded ones that do not.
    adapter = nn.Parameter(torch.ones(3, 3))
    slices = _by_slices(list(model.parameters()))
    beside = _by_slices([adapter, *model.parameters()])
    model.matrix.gather().sum().backward()
    refused = [
        _error_of(lambda: OptimManager().add_optimizer(AdamW(slices, weight_decay=0.1))),
        _error_of(lambda: OptimManager().add_optimizer(AdamW(beside, weight_decay=0.1))),
        _error_of(
            lambda: OptimManager().add_optimizer(
                torch.optim.SGD(reversed(slices), weight_decay=0.1)
            )
        ),
        # A loop without a manager.
        *(_error_of(torch.optim.SGD(slices, weight_decay=0.1).step) for _ in range(2)),
    ]
    alike = [{"params": group["params"]} for group in slices]
    by_module = [
        {"params": [adapter, nn.Parameter(torch.ones(3))]},
        {"params": [*model.parameters()], "weight_decay": 0.0},
    ]
    by_names_that_no_parameter_has = [
        {"params": [*model.parameters()]},
        {"params": [], "weight_decay": 0.0},
    ]
    accepted = [
        _error_of(lambda: OptimManager().add_optimizer(AdamW(groups, weight_decay=0.1)))  # noqa: B023
        for groups in (alike, by_module, by_names_that_no_parameter_has)
    ]
    by_ndim = [
        _by_dims(list(model.parameters()), dims_of)
        for dims_of in (lambda p: p.ndim, lambda p: p.data.ndim)
    ]
    accepted += [
        _error_of(lambda: OptimManager().add_optimizer(AdamW(groups, weight_decay=0.1)))  # noqa: B023
        for groups in by_ndim
    ]
    assert [_names([{"weight_decay": 0.1, **g} for g in groups], model) for groups in by_ndim] == [
        expected
    ] * 2
    chosen = param_groups(model, weight_decay=0.1)
    exempt = param_groups(model, weight_decay=0.1, no_decay=("embedding.*", "no such"))
    none_decays = param_groups(model, weight_decay=0.1, no_decay=("*",))
    for groups in (chosen, exempt, none_decays):
        accepted.append(_error_of(lambda: OptimManager().add_optimizer(AdamW(groups))))  # noqa: B023
        accepted.append(_error_of(torch.optim.SGD(groups, lr=0.0).step))
    assert _names(chosen, model) == expected
    # By its other name.
    assert _names(exempt, model) == [(0.1, ["matrix"]), (0.0, ["norm.weight", "scale", "tied"])]
    assert all(
        "or use bmt.optim.param_groups(model, weight_decay=0.1), which goes by" in text
        for text in refused
    )
    assert refused[0].startswith("Parameter group 1 (weight_decay=0.0) has all sharded parameters")
    assert all("of shape (7, 3), " in text and "of shape (), " in text for text in refused)
    assert accepted == [""] * len(accepted)


@on_ranks(2)
def test_a_group_that_a_part_s_shape_may_have_left_empty_is_warned_of() -> None:
    p = DistributedParameter(torch.ones(4, 3))
    rates = [{"params": [], "lr": 0.1}, {"params": [p], "lr": 1.6}]
    decays = [{"params": [p], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.1}]
    texts = []
    for groups in (
        rates,
        decays,
        # By names, as transformers' Trainer makes them: what would be vectors is empty.
        [{"params": [p], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}],
        [{"params": [DistributedParameter(torch.ones(4))], "lr": 1.0}, {"params": [], "lr": 0.1}],
        # As PEFT's LoRA+ makes them: there are no embeddings.
        [{"params": [p]}, {"params": [], "lr": 0.1}, {"params": [nn.Parameter(torch.ones(1, 1))]}],
        param_groups(
            nn.ParameterList([DistributedParameter(torch.ones(4, 3))]),
            weight_decay=0.1,
            no_decay=("*",),
        ),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            OptimManager().add_optimizer(AdamW(groups))
        texts.append(" ".join(str(each.message) for each in caught))
    if rank() == 0:
        assert texts[0].startswith("Parameter group 0 (lr=0.1, weight_decay=0.01) is empty")
        assert "of shape (4, 3)" in texts[0] and "take p.ndim" in texts[0]
        assert texts[1].startswith("Parameter group 1 (lr=0.001, weight_decay=0.1) is empty")
    assert texts[2:] == [""] * 4 and (rank() == 0 or texts == [""] * 6)


def test_one_pattern_alone_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass \('\*norm\*',\)"):
        param_groups(nn.Linear(1, 1), weight_decay=0.1, no_decay="*norm*")


@pytest.mark.parametrize("pattern", ["tied", "embedding.*"])
def test_a_tied_parameter_is_exempt_by_any_of_its_names(pattern: str) -> None:
    model = Model(nn.Parameter)
    found = _names(param_groups(model, weight_decay=0.1, no_decay=(pattern,)), model)
    assert found == [(0.1, ["matrix"]), (0.0, ["norm.weight", "scale", "tied"])]
