"""Everything that is handed to a lane is kept, and waited for, as CUDA's streams need it: found out
on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lane_trainings import Case, Sharded, Values, cases, compare, plain, train
from random_differences import settings_of
from random_plans import draw
from random_trainings import ShardedTraining
from stream_order import PrivateBackend, ordered
from torch import nn

from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import current
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block
from cells import run_cells

INIT = {"comm_backend": PrivateBackend}
IN_TORCH = {"BMT_KERNELS": "reference"}  # compiled kernels would read and write out of sight


def drawn(level: int, recomputes: bool) -> list[Case]:
    """Half of the cases, so that each two of block, optimizer and held micro-batches meet: on GPUs
    all of them run (test_delays_on_gpus.py).
    """
    *product, postponed = cases(level, recomputes)
    ways = len(product) // 2
    return [
        *(case for i, case in enumerate(product) if case.held == ((i % ways + level) % 2 == 1)),
        postponed,
    ]


def trainings(given: Sequence[Case]) -> list[tuple[Values, list[str], int]]:
    found = []
    for case in given:
        with ordered() as order:
            model = Sharded(case)
            found.append((train(model, case), order.mistakes, order.uses))
    return found


def check(given: Sequence[Case], ranks: int, **init: Any) -> None:
    (expected,) = in_plain_torch()
    of_ranks = run_ranks(trainings, ranks, given, init={**INIT, **init}, env=IN_TORCH, timeout=120)
    for case, *found in zip(given, *of_ranks, strict=True):
        compare(expected, [values for values, _, _ in found], case)
        for _, mistakes, uses in found:
            assert mistakes == [] and uses > 50, case


@functools.cache
def in_plain_torch() -> list[Values]:
    return run_ranks(plain, 1)


SLOW = pytest.mark.slow("bmt-core", "bmt-optim", "bmt-params", "bmt-zero")
KINDS = [(0, True, None), (1, False, None), (3, False, 0), (2, True, 10**9)]


@pytest.mark.parametrize(("level", "recomputes", "prefetch_bytes"), KINDS)
def test_what_lanes_use_is_kept_and_waited_for(
    level: int, recomputes: bool, prefetch_bytes: int | None
) -> None:
    check(drawn(level, recomputes), 2, prefetch_bytes=prefetch_bytes)


@pytest.mark.parametrize(("level", "optimizer_shards"), [(0, None), (3, "all")])
def test_what_the_lane_over_replicas_uses_is_kept_and_waited_for(
    level: int, optimizer_shards: Any
) -> None:
    whole, held = (
        Case(level, True, held, optimizer, splits=False, postponed=False)
        for held, optimizer in ((False, "torch"), (True, "adam"))
    )
    check((whole, held), 4, shard_size=2, optimizer_shards=optimizer_shards)


def random_training(seed: int, folder: str) -> tuple[list[str], int]:
    with ordered() as order:
        ShardedTraining(draw(seed, tp=1, pp=1), folder).run()
    return order.mistakes, order.uses


# Each takes an odd way to the lanes: skipped, repeated and failed steps, hooks, gradients that are
# asked for, several dtypes. On four ranks: with shard_size=2.
# Of torch's reentrant checkpoint.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("seed", "ranks"),
    [
        *[(60, 2), (75, 2), (85, 4)],
        *[
            pytest.param(*case, marks=SLOW)
            for case in [(63, 2), (65, 2), (73, 2), (76, 2), (71, 4), (99, 4), (171, 4)]
        ],
    ],
)
def test_what_lanes_use_in_a_random_training_is_kept_and_waited_for(
    seed: int, ranks: int, tmp_path: Path
) -> None:
    init = {**settings_of(draw(seed, tp=1, pp=1), ranks, "cpu"), **INIT}
    for mistakes, uses in run_ranks(
        random_training, ranks, seed, str(tmp_path), init=init, env=IN_TORCH
    ):
        assert mistakes == [] and uses > 50


@on_ranks(2, init=INIT)
def test_a_block_that_is_dropped_gives_its_parameters_back_after_they_were_read() -> None:
    with ordered() as order:
        block = Block(nn.Linear(4, 4), zero_level=1)
        block(torch.ones(2, 4))
        del block
        order.look()
    assert order.mistakes == []


def reduced(lane: Lane, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
    lane.follow()
    group = lane.group(current().world)
    return lane.run(lambda: group.reduce_scatter(received, sent)).wait


def by_hand(how: str) -> list[str]:
    """Reduce a tensor in a lane, in one right way and in some that are wrong."""
    with ordered() as order:
        lane = current().lanes.reduce
        sent, received = torch.ones(8) * 2, torch.empty(4)
        if how == "without order":
            sent = sent * 2
            lane.run(lambda: lane.group(current().world).reduce_scatter(received, sent)).wait()
        if how == "memory of the lane":
            with lane.memory():
                received = torch.empty(4)
        wait = reduced(lane, sent, received)
        if how == "freed":
            sent = sent[:0].clone()
        if how == "overwritten":
            sent.zero_()
        if how == "target freed":
            received = received[:0].clone()
        if how == "not waited for":
            received.sum()
        wait()
        received.sum()
        if how == "memory of the lane":
            del received
        order.look()
    return order.mistakes


MISTAKES = {
    "right": None,
    "freed": "reads what was made while (8,) torch.float32 made by mul of the computation is freed",
    "overwritten": "reads what was made while the computation writes (8,) torch.float32 made by mul"
    " in zero_",
    "target freed": "(4,) torch.float32 made by empty of the computation is freed, which does not"
    " wait for the reduce lane",
    "not waited for": "the computation reads (4,) torch.float32 made by empty in sum, which does"
    " not wait for the reduce lane",
    "without order": "the reduce lane reads (8,) torch.float32 made by mul in clone, which does not"
    " wait for the computation",
    "memory of the lane": "(4,) torch.float32 made by empty of the reduce lane is freed, which does"
    " not wait for the computation",
}


def test_mistakes_with_a_lane_are_found() -> None:
    for (how,), of_ranks in run_cells(by_hand, 2, zip(MISTAKES), init=INIT):
        for found in of_ranks:
            mistake = MISTAKES[how]
            assert found == [] if mistake is None else any(mistake in each for each in found), found
