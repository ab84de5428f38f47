"""``AdamW`` decays weights as ``torch.optim.AdamW`` in every type, and ``AdamOptimizer`` says where
it does not.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sharded_adam import parameters, train

from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, AdamW, OptimManager, create
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks


@pytest.mark.parametrize("options", [{}, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}])
def test_float32_is_torch_adamw_in_every_bit_with_its_defaults(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    train(range(6), create("adamw", ours, **options), torch.optim.AdamW(theirs, **options))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, AdamOptimizer])
@pytest.mark.parametrize("through_manager", [False, True])
def test_a_state_of_another_adam_loads_and_decay_stays_decoupled(
    kind: Any, through_manager: bool
) -> None:
    ours, theirs = parameters(), parameters()
    other = kind(theirs, lr=0.01, weight_decay=0.1)
    train(range(3), other)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.detach())
    mine = AdamW(ours, lr=0.5, weight_decay=0.2)
    if through_manager:
        saving, loading = OptimManager(), OptimManager()
        saving.add_optimizer(other)
        loading.add_optimizer(mine)
        loading.load_state_dict(saving.state_dict(gather_opt=True))
    else:
        mine.load_state_dict(other.state_dict())
    expected = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    expected.load_state_dict(
        {**other.state_dict(), "param_groups": expected.state_dict()["param_groups"]}
    )
    for state in expected.state.values():
        state["step"] = torch.tensor(float(state["step"]))
    train(range(3, 6), mine, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_group_that_asks_for_l2_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"decoupled_weight_decay of a group is False.*use AdamOptimizer"
    ):
        AdamW([{"params": parameters(), "decoupled_weight_decay": False}])


def _warnings_of(make: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return caught


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer])
def test_decay_of_float32_parameters_that_is_l2_by_default_warns_once_at_the_users_line(
    kind: Any,
) -> None:
    two_groups = [{"params": parameters()}, {"params": parameters()}]
    caught = _warnings_of(lambda: kind(two_groups, weight_decay=0.1))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "weight_decay=0.1 for 5 parameters of torch.float32" in str(caught[0].message)
    assert "bmt.optim.AdamW" in str(caught[0].message) and "decoupled_weight_decay=False" in str(
        caught[0].message
    )


def _with_a_group_added_later() -> AdamOptimizer:
    optimizer = AdamOptimizer(parameters())
    for _ in range(2):
        optimizer.add_param_group({"params": parameters(), "weight_decay": 0.1})
    return optimizer


@pytest.mark.parametrize(
    "make", [_with_a_group_added_later, lambda: create("adam", parameters(), weight_decay=0.1)]
)
def test_decay_that_is_l2_by_default_warns_however_the_optimizer_gets_it(make: Any) -> None:
    caught = _warnings_of(make)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"weight_decay": 0.1, "decoupled_weight_decay": False}),
        (torch.float32, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (torch.float32, {}),
        (torch.bfloat16, {"weight_decay": 0.1}),
    ],
)
def test_nothing_is_said_where_the_choice_is_made_or_makes_no_difference(
    kind: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert not _warnings_of(lambda: kind(parameters(dtype), **options))
    assert not _warnings_of(lambda: AdamW(parameters(dtype), weight_decay=0.1))


@on_ranks(2)
def test_only_rank_0_warns() -> None:
    shards = [DistributedParameter(p.detach()) for p in parameters()]
    caught = _warnings_of(lambda: AdamOptimizer(shards, weight_decay=0.1))
    assert len(caught) == (1 if runtime.rank() == 0 else 0)
