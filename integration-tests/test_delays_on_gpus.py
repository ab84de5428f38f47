"""On GPUs, delays on any stream and the reuse of freed memory change nothing: see ``delays.py``."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import PLACES, Where, delayed, overwrite_freed_memory
from lane_trainings import Sharded, Values, cases, compare, plain, train
from random_differences import differences
from random_plans import Plan, draw
from random_trainings import ShardedTraining

from bmt_core.run.runtime import current
from bmt_testing import run_ranks
from bmt_testing.comparison import Record

pytestmark = pytest.mark.gpu(2)
INIT = {"device": "cuda"}
KINDS = [*itertools.product((0, 1, 2, 3), (False, True), (None,)), (3, False, 0), (2, True, 10**9)]


@cache
def expected() -> Values:
    (values,) = run_ranks(plain, 1, init=INIT)
    return values


def trainings(level: int, recomputes: bool) -> list[Values]:
    found = []
    for case, where in itertools.product(cases(level, recomputes), PLACES):
        with delayed(where) as watch:
            model = Sharded(case)
            watch(model)
            found.append(train(model, case))
    return found


@pytest.mark.parametrize(("level", "recomputes", "prefetch_bytes"), KINDS)
def test_delays_and_reuse_of_memory_change_nothing(
    level: int, recomputes: bool, prefetch_bytes: int | None
) -> None:
    init = {**INIT, "prefetch_bytes": prefetch_bytes}
    ranks = run_ranks(trainings, 2, level, recomputes, init=init, timeout=240)
    for what, *found in zip(
        itertools.product(cases(level, recomputes), PLACES), *ranks, strict=True
    ):
        compare(expected(), found, what)


def run_delayed(plan: Plan, folder: str, where: Where) -> Record:
    with delayed(where) as watch:
        training = ShardedTraining(plan, folder)
        watch(training.model)
        return training.run()


# Those above 9000 have found gradients whose memory was reused while they were reduced.
# Of torch's reentrant checkpoint.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("seed", [60, 65, 75, 9021, 9032, 9059, 9064])
def test_delays_change_no_random_training(seed: int, where: Where, tmp_path: Path) -> None:
    assert differences(draw(seed, tp=1, pp=1), 2, str(tmp_path), "cuda", run_delayed, where) == []


def is_reduced_right(*, keeps: bool) -> bool:
    """Reduce a tensor, a tenth of a second late, and let go of it before or after."""
    lane: Any = current().lanes.reduce
    group = lane.group(current().world)
    received = torch.empty(1 << 15, device="cuda")
    given = [torch.ones(1 << 16, device="cuda")]
    kept = given[0] if keeps else None
    lane.follow()
    with torch.cuda.stream(lane.stream):
        torch.cuda._sleep(200_000_000)
    mark = lane.run(lambda: group.reduce_scatter(received, given.pop()))
    overwrite_freed_memory()
    mark.wait()
    del kept
    return bool(received.eq(2).all())


def kept_and_freed() -> tuple[bool, bool]:
    return is_reduced_right(keeps=True), is_reduced_right(keeps=False)


def test_memory_that_is_freed_too_early_is_found() -> None:
    assert run_ranks(kept_and_freed, 2, init=INIT) == [(True, False)] * 2
