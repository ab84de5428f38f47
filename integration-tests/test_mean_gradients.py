"""``init_distributed(gradients="mean")``: loops that step by themselves train as one process does
in plain torch.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from chain_models import Chain, batch
from torch import nn
from zero_models import full_gradient, my_part

from bmt_core.run.runtime import current, rank
from bmt_core.settings import ReduceDtype
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_params import init_parameters
from bmt_params.locality import Locality
from bmt_params.modules.declared_locality import set_locality
from bmt_params.parameter import DistributedParameter
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks, run_ranks
from bmt_tp import ColumnParallelLinear
from bmt_zero import Block
from cells import cells, run_cells
from pairwise import pairwise

MEAN = {"gradients": "mean"}
HELD: dict[str, Any] = {"micro_batches": 2, "no_sync": True}


@pytest.mark.parametrize(
    "settings",
    [
        TrainingSettings(levels=(0, 1, 2, 3), **HELD),
        TrainingSettings(ranks=4, levels=(0, 1, 2, 3), **HELD),
        TrainingSettings(
            ranks=2, levels=(3, 1, 0), dtype="bfloat16", reduce_dtype="param", micro_batches=2
        ),
        TrainingSettings(ranks=4, levels=(0, 2, 1), dtype="float16", reduce_dtype="fp32", **HELD),
    ],
    ids=repr,
)
def test_a_plain_loop_trains_as_one_process_does(settings: TrainingSettings) -> None:
    assert_matches_single(Chain, batch, settings=settings)


class Scaled(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@on_ranks(4, init=MEAN)
def test_the_mean_of_half_types_neither_overflows_nor_is_rounded_before_it_is_divided() -> None:
    # The sum of all ranks' is 120000, and the largest number of float16 is 65504; at 30000 its
    # numbers are 16 apart.
    rows, expected = (torch.full((6,), 30000.0, dtype=torch.float16) for _ in range(2))
    reductions: tuple[ReduceDtype, ...] = ("param", "fp32-sum", "fp32")
    for level, reduce_dtype in itertools.product((0, 3), reductions):
        block = Block(Scaled(torch.float16), False, level, reduce_dtype=reduce_dtype)
        for x in (rows, rows / 30000, rows / 30000):  # reduced alone; the others are added to it
            block(x).float().sum().backward()
            found = full_gradient(next(block.parameters()))
            assert found is not None and torch.equal(found, expected), (level, reduce_dtype)
    asked = Block(Scaled(torch.float16), False, 3)
    (gradient,) = torch.autograd.grad(asked(rows).float().sum(), list(asked.parameters()))
    parameter = asked._bmt_block.state.groups[0].parameters[0]
    assert torch.equal(parameter.gather_like(gradient), expected)


@on_ranks(4, init={**MEAN, "pipe_size": 2})
@cells(
    "level, reduce_dtype, dtype",
    pairwise(range(4), ["param", "fp32-sum", "fp32"], [torch.bfloat16, torch.float32]),
)
def test_gradients_are_divided_by_the_ranks_with_other_data_not_by_those_that_sum_them(
    level: int, reduce_dtype: ReduceDtype, dtype: torch.dtype
) -> None:
    """A block of one stage: its gradient is summed over half of the ranks, and divided by all."""
    block = Block(Scaled(dtype), False, level, mode="PIPE", reduce_dtype=reduce_dtype)
    for x in (2.0, 1.0):
        block(torch.full((6,), x, dtype=dtype)).float().sum().backward()
    found = full_gradient(block.weight)
    assert found is not None and found.tolist() == [1.5] * 6


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        # The two ranks of a stage have its own, and all see different data.
        ({"pipe_size": 2}, [0.5, 0.5, 1.0, 1.0]),
        # Two ranks see different data, and four, or two, sum.
        ({"tp_size": 2}, [2.0, 2.0, 2.0, 1.0]),
        ({"pipe_size": 4}, [0.25, 0.25, 1.0, 1.0]),
    ],
    ids=str,
)
@on_ranks(4, init=lambda ranks, grid: {**MEAN, **grid})
def test_parameters_that_are_gathered_alone_have_means(grid: Any, wanted: list[float]) -> None:
    """Gradients of parameters that are read by ``gather()``: every rank has the gradient 1."""
    share = Locality("tp", gradients="share")
    # Every rank has all of it.
    block = Block(set_locality(Scaled(torch.float32), share), False, 0, mode="PIPE")
    places = [[Locality("pp"), share], [share], [Locality("tp", gradients="whole")]]
    alone = [DistributedParameter(torch.zeros(6), locality=place) for place in places]
    parameters = [block.weight, *alone]
    sum(p.gather().sum() for p in parameters).backward()
    assert [p.gather_like(p.grad).unique().tolist() for p in parameters] == [[x] for x in wanted]


class Mixed(nn.Module):
    """A Block, a distributed parameter that is read on its own, and an ordinary one."""

    def __init__(self, *, is_sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer, alone, ordinary = nn.Linear(3, 3), torch.randn(5, 3), torch.randn(3)
        self.layer = Block(layer, zero_level=3) if is_sharded else layer
        self.alone = DistributedParameter(alone) if is_sharded else nn.Parameter(alone)
        self.ordinary = nn.Parameter(ordinary)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.alone.gather() if isinstance(self.alone, DistributedParameter) else self.alone
        return (self.layer(x) @ alone.t()).pow(2).mean() + (self.ordinary * x).sum(-1).sin().mean()


def mixed_training(optimizer: str | None) -> tuple[list[Any], float, list[str]]:
    """Two steps, the second of two backward passes with a clip between them; what comes
    out, whole.
    """
    model = Mixed(is_sharded=optimizer is not None)
    kinds = {"adam": AdamOptimizer, "offload": AdamOffloadOptimizer, None: torch.optim.Adam}
    made = kinds[optimizer](model.parameters(), lr=0.1)  # type: ignore[operator]
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
    numbers: list[Any] = []
    if optimizer is None:
        for backwards in (1, 2):
            made.zero_grad()
            for _ in range(backwards):
                model.loss(x).backward()
                numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            made.step()
        return [*numbers, *[p.detach() for p in model.parameters()]], 1.0, []
    manager = OptimManager(loss_scale=256.0)
    manager.add_optimizer(made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for backwards in (1, 2):
            manager.zero_grad()
            for _ in range(backwards):
                manager.backward(model.loss(my_part(x)))
                numbers.append(float(manager.clip_grad_norm(model.parameters(), 0.5)))
            manager.step()
    whole = [p.gather() if isinstance(p, DistributedParameter) else p for p in model.parameters()]
    return (
        [*numbers, *[p.detach() for p in whole]],
        manager.grad_scale,
        [str(one.message) for one in caught],
    )


def test_a_manager_divides_nothing_where_gradients_are_means() -> None:
    wanted, _, _ = mixed_training(None)
    for optimizer, of_ranks in run_cells(mixed_training, 2, [("adam",), ("offload",)], init=MEAN):
        for found, grad_scale, warned in of_ranks:
            assert grad_scale == 1 and warned == [], optimizer
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "grid"), [({}, {"tp_size": 2}), (MEAN, {}), (MEAN, {"pipe_size": 2})], ids=str
)
@on_ranks(4, init=lambda ranks, given, grid: {**given, **grid})
def test_ordinary_parameters_have_the_gradients_of_distributed_ones(given: Any, grid: Any) -> None:
    """After two backward passes with a clip, which sums ordinary ones, after each. Each rank adds
    its number.
    """
    manager = OptimManager()
    ordinary, distributed = nn.Parameter(torch.zeros(3)), DistributedParameter(torch.zeros(3))
    manager.add_optimizer(torch.optim.SGD([ordinary, distributed], lr=0.1))
    for _ in range(2):
        manager.backward(((ordinary + distributed.gather()) * (current().rank + 1)).sum())
        manager.clip_grad_norm([ordinary, distributed], 1e9)
    assert ordinary.grad is not None and distributed.grad is not None
    # Ranks along tp have the same data.
    wanted = [2 * (1 + 2 + 3 + 4) / (2 if "tp_size" in grid else 4)] * 3
    assert ordinary.grad.tolist() == wanted
    assert distributed.gather_like(distributed.grad).tolist() == wanted


@pytest.mark.parametrize(
    ("gradients", "scales", "has_ordinary", "expected"),
    [
        ("sum", False, False, ["sums over 2 ranks", 'gradients="mean"']),
        ("sum", False, True, ["sums over 2 ranks", "1 of its parameters are ordinary"]),
        ("mean", False, True, ["1 of its parameters are ordinary"]),
        ("mean", False, False, []),
        ("sum", True, True, []),
    ],
)
@on_ranks(2, init=lambda ranks, gradients: {"gradients": gradients})
def test_a_loop_without_a_manager_is_warned_once(
    gradients: str, scales: bool, has_ordinary: bool, expected: list[str]
) -> None:
    """In two steps, also of a loop that scales losses by a manager."""
    model = Mixed(is_sharded=True)
    model.ordinary.requires_grad_(has_ordinary)
    optimizer, manager = AdamOptimizer(model.parameters()), OptimManager()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model.loss(torch.ones(2, 3))
            (manager.scale_loss(loss) if scales else loss).backward()
            optimizer.step()
    assert len(caught) == (bool(expected) and rank() == 0)
    assert all(part in str(one.message) for one in caught for part in expected)


def warned_along_tp(has_own_rows: bool, manages: bool) -> list[str]:
    """What is said in two steps of a loop with an ordinary norm beside a parallel layer, for rows
    of its own or for all rows.
    """
    layer = ColumnParallelLinear(4, 4, gather_input=has_own_rows)
    init_parameters(layer)
    norm = nn.LayerNorm(4)
    optimizer, manager = (
        torch.optim.SGD([*layer.parameters(), *norm.parameters()], lr=0.1),
        OptimManager(),
    )
    manager.add_optimizer(optimizer)
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank() if has_own_rows else 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = layer(norm(rows)).square().mean()
            (manager.scale_loss(loss) if manages else loss).backward()
            manager.step() if manages else optimizer.step()
    return [str(one.message) for one in caught]


def test_ordinary_parameters_that_drift_apart_along_tp_are_warned_of_once() -> None:
    said, unsaid = run_ranks(warned_along_tp, 2, True, False, init={"tp_size": 2})
    assert (
        unsaid == []
        and len(said) == 1
        and "2 of its parameters are ordinary" in said[0]
        and "sums" not in said[0]
    )
    for has_own_rows, manages in ((False, False), (True, True)):
        assert run_ranks(warned_along_tp, 2, has_own_rows, manages, init={"tp_size": 2}) == [[], []]
