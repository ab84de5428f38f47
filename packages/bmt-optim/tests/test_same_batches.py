"""One warning if all ranks that should see different data train on the same batches."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from managed import managed, no_host_reads, parameter
from scratch_axes import SLICE, grid_with

from bmt_core import mean_loss, sum_loss
from bmt_core.run import runtime
from bmt_core.run.collectives import all_gather, all_reduce
from bmt_optim import OptimManager
from bmt_testing import on_ranks
from cells import cells

Loss = Callable[[torch.Tensor, int], torch.Tensor]


def same(p: torch.Tensor, step: int) -> torch.Tensor:
    return (p * (step + 1)).square().mean()


def other(p: torch.Tensor, step: int) -> torch.Tensor:
    return same(p, step) * (1 + 1e-6 * runtime.rank())


LOSSES: dict[str, tuple[Loss, int]] = {
    "the same": (same, 1),
    "other ones": (other, 0),
    "the same in two steps": (lambda p, step: (same if step < 2 else other)(p, step), 0),
    "zero": (lambda p, step: p.sum() * 0, 0),
    "zero at first": (lambda p, step: same(p, step) * bool(step), 0),
    "the same in every step": (lambda p, step: (p * 0).sum() + 0.7, 0),
    "of a half type": (lambda p, step: same(p, step).bfloat16(), 0),
    "infinite": (lambda p, step: same(p, step) * float("inf"), 0),
    "a mean over ranks": (lambda p, step: sum_loss(other(p, step)) / 2 + p.sum() * 0, 0),
    "a mean over tokens": (lambda p, step: mean_loss(other(p, step), count=3), 0),
    "of the features of all ranks": (lambda p, step: all_gather(other(p, step)).logsumexp(0), 0),
}
"""By name: a loss of a parameter in a step, and how many warnings there are."""


def warnings_of(loss: Loss, *, micro_batches: int = 1, count: int | None = None) -> list[Any]:
    """Take five steps; return the warnings on this rank."""
    p = parameter()
    manager = managed(p, "momentum")
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "The losses of the first")
        warnings.filterwarnings("ignore", "The gradients of the")
        for step in range(5):
            for _ in range(micro_batches):
                manager.backward(loss(p, step), count=count)
            manager.step()
            manager.zero_grad()
    return [each for each in caught if "The losses of the first" in str(each.message)]


@on_ranks(4)
@cells(("micro_batches", "count"), [(1, None), (2, 3)])
def test_losses_that_are_the_same_on_all_ranks_in_three_steps_are_warned_of_once(
    micro_batches: int, count: int | None
) -> None:
    said = {
        name: warnings_of(loss, micro_batches=micro_batches, count=count)
        for name, (loss, _) in LOSSES.items()
    }
    for name, (_, expected) in LOSSES.items():
        assert len(said[name]) == (expected if runtime.rank() == 0 else 0), name
    for each in itertools.chain(*said.values()):
        assert f"on all {runtime.world_size()} ranks" in str(each.message)
        assert each.filename == __file__ and "topology.data_rank" in str(each.message)


@on_ranks(4, init=grid_with(SLICE))
def test_ranks_with_the_same_data_are_not_compared() -> None:
    topology = runtime.current().topology
    assert topology.data_group.ranks == (runtime.rank() % 2, runtime.rank() % 2 + 2)
    for of_data, expected in ((True, 0), (False, 1)):
        factor = 1.0 + (topology.data_rank if of_data else 0)
        caught = warnings_of(lambda p, step, f=factor: same(p, step) * f)  # type: ignore[misc]
        assert len(caught) == (expected if runtime.rank() == 0 else 0)
    slices = topology.group(("slice",))  # a mean over them says nothing of other data
    caught = warnings_of(lambda p, step: all_reduce(same(p, step), "avg", slices))
    assert len(caught) == (runtime.rank() == 0)


@on_ranks(2, init=grid_with(SLICE))
def test_if_all_ranks_have_the_same_data_nothing_is_said() -> None:
    assert warnings_of(same) == []


@on_ranks(1)
def test_one_rank_has_nobody_to_compare_with() -> None:
    assert warnings_of(same) == []


@on_ranks(2)
@cells("loss", [same, other])
def test_after_three_steps_nothing_is_read_on_the_host(loss: Loss) -> None:
    p = parameter()
    manager = OptimManager(non_finite="ignore", sum_plain_gradients=False)
    manager.add_optimizer(torch.optim.SGD([p], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            manager.backward(loss(p, step))
            manager.step()
            manager.zero_grad()
    with no_host_reads():
        manager.backward(loss(p, 3))
        manager.step()
    manager.zero_grad()
