"""``init_distributed(gradients="mean")``: loops that step by themselves train as one process does
in plain torch.
"""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pipeline_trainings as pipelines
import pytest
import tensor_trainings
import torch
from pipeline_trainings import Piped, of_all_stages, on_grid
from torch import nn
from zero_models import Model, batch, full_gradient, my_part

from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current, rank
from bmt_core.settings import ReduceDtype
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_params import init_parameters
from bmt_params.locality import Locality
from bmt_params.modules.declared_locality import set_locality
from bmt_params.parameter import DistributedParameter
from bmt_pipeline import train_step
from bmt_testing import on_ranks, run_ranks
from bmt_tp import ColumnParallelLinear
from bmt_zero import Block, BMTrainModelWrapper, no_sync
from cells import cells, run_cells
from pairwise import pairwise

STEPS, MICRO_BATCHES = 2, 2
MEAN = {"gradients": "mean"}
Levels = tuple[int, int, int]
Found = dict[str, torch.Tensor]
CASES: list[tuple[Levels, ReduceDtype, bool]] = [
    ((0, 1, 2), "fp32-sum", True),
    ((3, 3, 3), "fp32-sum", False),
    ((3, 1, 0), "param", False),
    ((0, 2, 1), "fp32", True),
]


def loss_of(model: nn.Module, micro: int, own: Any) -> torch.Tensor:
    tokens, targets = (own(part) for part in batch(micro))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def loop(model: nn.Module, own: Any, *, holds: bool, hooked: bool = False) -> Found:
    """A loop in plain torch's way; return the gradients of the last step and the
    parameters, whole.
    """
    if hooked:
        next(model.parameters()).register_hook(lambda grad: grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            with no_sync(model) if holds and micro < MICRO_BATCHES - 1 else nullcontext():
                (loss_of(model, step * MICRO_BATCHES + micro, own) / MICRO_BATCHES).backward()
        optimizer.step()
    found = {name: full_gradient(p) for name, p in model.named_parameters()}
    return {
        **{f"grad {name}": g for name, g in found.items() if g is not None},
        **model.state_dict(),
    }


def plain(dtype: torch.dtype) -> Found:
    torch.manual_seed(0)
    return loop(Model(dtype=dtype), lambda part: part, holds=False)


def wrapped(levels: Levels, reduce_dtype: ReduceDtype, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    for layer, level in zip(model.layers, levels, strict=True):
        Block(layer, zero_level=level, reduce_dtype=reduce_dtype)
    return BMTrainModelWrapper(model)


def all_cases(dtype: torch.dtype) -> list[Found]:
    return [
        loop(wrapped(levels, reduce_dtype, dtype), my_part, holds=holds, hooked=number == 1)
        for number, (levels, reduce_dtype, holds) in enumerate(CASES)
    ]


def compare(found: Found, wanted: Found, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (1, torch.float64),
        (4, torch.float64),
        (2, torch.bfloat16),
        (4, torch.float16),
    ],
    ids=str,
)
def test_a_plain_loop_trains_as_one_process_does(world_size: int, dtype: torch.dtype) -> None:
    wanted = plain(dtype)
    for results in run_ranks(all_cases, world_size, dtype, init=MEAN):
        for found in results:
            # A few roundings of bfloat16 (2**-8), of float16 (2**-11).
            compare(
                found,
                wanted,
                {torch.float64: 1e-9, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype],
            )


class Scaled(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def large_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    found = []
    for level, reduce_dtype in itertools.product((0, 3), ("param", "fp32-sum", "fp32")):
        block = Block(Scaled(dtype), False, level, reduce_dtype=reduce_dtype)  # type: ignore[arg-type]
        for x in (30000.0, 1.0, 1.0):  # the first is reduced alone, the others are added to it
            block(torch.full((6,), x, dtype=dtype)).float().sum().backward()
            found.append(full_gradient(next(block.parameters())))  # type: ignore[arg-type]
    asked = Block(Scaled(dtype), False, 3)
    found.append(
        asked._bmt_block.state.groups[0]
        .parameters[0]
        .gather_like(
            torch.autograd.grad(
                asked(torch.full((6,), 30000.0, dtype=dtype)).float().sum(),
                list(asked.parameters()),
            )[0]
        )
    )
    return found


def test_the_mean_of_half_types_neither_overflows_nor_is_rounded_before_it_is_divided() -> None:
    *accumulated, asked = run_ranks(large_gradients, 4, torch.float16, init=MEAN)[0]
    for number, found in enumerate(accumulated):
        # The sum of all ranks' is 120000, and the largest number of float16 is 65504; at 30000 its
        # numbers are 16 apart.
        assert torch.equal(found, torch.full((6,), 30000.0, dtype=torch.float16)), number
    assert torch.equal(asked, torch.full((6,), 30000.0, dtype=torch.float16))


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


def gathered_alone() -> list[list[float]]:
    """Gradients of parameters that are read by ``gather()``: every rank has the gradient 1."""
    share = Locality("tp", gradients="share")
    # Every rank has all of it.
    block = Block(set_locality(Scaled(torch.float32), share), False, 0, mode="PIPE")
    places = [[Locality("pp"), share], [share], [Locality("tp", gradients="whole")]]
    alone = [DistributedParameter(torch.zeros(6), locality=place) for place in places]
    parameters = [block.weight, *alone]
    sum(p.gather().sum() for p in parameters).backward()
    return [p.gather_like(p.grad).unique().tolist() for p in parameters]


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
def test_parameters_that_are_gathered_alone_have_means(grid: Any, wanted: list[float]) -> None:
    for found in run_ranks(gathered_alone, 4, init={**MEAN, **grid}):
        assert found == [[one] for one in wanted]


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


def ordinary_beside_distributed() -> tuple[list[float], list[float]]:
    """Gradients after two backward passes with a clip, which sums ordinary ones, after each. Each
    rank adds its number.
    """
    manager = OptimManager()
    ordinary, distributed = nn.Parameter(torch.zeros(3)), DistributedParameter(torch.zeros(3))
    manager.add_optimizer(torch.optim.SGD([ordinary, distributed], lr=0.1))
    for _ in range(2):
        manager.backward(((ordinary + distributed.gather()) * (current().rank + 1)).sum())
        manager.clip_grad_norm([ordinary, distributed], 1e9)
    assert ordinary.grad is not None and distributed.grad is not None
    return ordinary.grad.tolist(), distributed.gather_like(distributed.grad).tolist()


@pytest.mark.parametrize(
    ("init", "grid"), [({}, {"tp_size": 2}), (MEAN, {}), (MEAN, {"pipe_size": 2})], ids=str
)
def test_ordinary_parameters_have_the_gradients_of_distributed_ones(init: Any, grid: Any) -> None:
    # Ranks along tp have the same data.
    wanted = [2 * (1 + 2 + 3 + 4) / (2 if "tp_size" in grid else 4)] * 3
    for found in run_ranks(ordinary_beside_distributed, 4, init={**init, **grid}):
        assert found == (wanted, wanted)


def plain_pipeline_step(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    topology = current().topology
    own_ids, own_targets = [x.chunk(topology.data_size)[topology.data_rank] for x in (ids, targets)]
    loss = pipelines.loss_of(model(own_ids), own_targets)
    loss.backward()
    return all_reduce(loss.detach(), "avg")


def plain_scheduled_step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    topology = current().topology
    own = [x.chunk(topology.axis_size("dp"))[topology.axis_rank("dp")] for x in (ids, targets)]
    return all_reduce(train_step(model, pipelines.loss_of, (own[0], own[1]), "1f1b", 4), "avg")


def piped(is_list: bool) -> pipelines.Record:
    step = plain_pipeline_step if is_list else plain_scheduled_step
    return of_all_stages(pipelines.train(Piped(3, 2, True), step))


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "train_step"])
def test_pipelines_give_means(is_list: bool) -> None:
    for found in on_grid("pp 2 x dp 2", piped, is_list, init=MEAN):
        pipelines.compare(found, pipelines.expected(3))


def test_tensor_parallel_layers_get_means() -> None:
    tensor_trainings.check("tp 2 x dp 2", init=MEAN, block={"zero_level": 3})


def warned_of(scales: bool, has_ordinary: bool) -> list[str]:
    """What is said in two steps of a loop without a manager, or of one that scales losses by
    a manager.
    """
    model = Mixed(is_sharded=True)
    model.ordinary.requires_grad_(has_ordinary)
    optimizer, manager = AdamOptimizer(model.parameters()), OptimManager()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model.loss(torch.ones(2, 3))
            (manager.scale_loss(loss) if scales else loss).backward()
            optimizer.step()
    return [str(one.message) for one in caught]


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
def test_a_loop_without_a_manager_is_warned_once(
    gradients: str, scales: bool, has_ordinary: bool, expected: list[str]
) -> None:
    init = {"gradients": gradients}
    said, unsaid = run_ranks(warned_of, 2, scales, has_ordinary, init=init)
    assert unsaid == [] and len(said) == bool(expected)
    assert all(part in text for text in said for part in expected)


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
