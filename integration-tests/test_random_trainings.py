"""Trainings drawn at random equal those of one process in plain torch; ``fuzz.py`` runs more
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from random_differences import differences
from random_plans import draw

SLOW = pytest.mark.slow(
    *("bmt-core", "bmt-kernels", "bmt-optim", "bmt-params", "bmt-pipeline", "bmt-tp", "bmt-zero")
)


def some(options: Callable[..., dict[str, Any]], quick: Sequence[Any], *others: Any) -> list[Any]:
    """Return the ``quick`` cases, and ``others`` that run for packages that differ: trainings
    drawn at random have found mistakes by their number. A case has a number of ranks, arguments of
    ``options``, which returns what ``draw`` is given, and the number of the training.
    """
    return [
        pytest.param(ranks, seed, options(*given), marks=[] if case in quick else SLOW)
        for case in (*quick, *others)
        for ranks, *given, seed in [case]
    ]


# Those of 12, 29, 34 and, on four ranks, 44 have found mistakes. That of 124, with parallel layers
# in several Blocks, has found one too. By number of ranks and tp_size.
CASES = some(
    lambda tp: {"tp": tp, "pp": 1, "whole": False, "whole_tensors": False},
    [(1, 1, 29), (2, 1, 12), (2, 1, 34), (2, 1, 61), (4, 1, 71), (4, 1, 70), (2, 2, 124)],
    *[(1, 1, 12), (1, 1, 34), (2, 1, 29), (2, 1, 60), (2, 1, 62), (2, 1, 1037)],
    *[(4, 1, 29), (4, 1, 44), (2, 2, 77), (4, 2, 97), (4, 4, 76)],
)

# Of ranks along tp that pass whole activations from layer to layer.
CASES += some(
    lambda tp: {"tp": tp, "pp": 1, "whole": True, "whole_tensors": False},
    [(2, 2, 3), (4, 2, 5)],
    *[(2, 2, 4), (4, 4, 6)],
)

# By number of ranks, pipe_size and tp_size, with layers on stages: lists and schedules, several
# pipelines, a step that fails.
CASES += some(
    lambda pp, tp: {"tp": tp, "pp": pp, "whole_tensors": False},
    [(2, 2, 1, 200), (2, 2, 1, 207), (4, 2, 1, 238), (4, 2, 2, 50)],
    *[(2, 2, 1, 201), (2, 2, 1, 217), (4, 2, 1, 11)],
)

# By number of ranks, pipe_size and tp_size, with optimizers that need whole tensors.
CASES += some(
    lambda pp, tp: {"tp": tp, "pp": pp, "whole_tensors": True},
    [(2, 2, 1, 302), (4, 1, 2, 303)],
    *[(2, 1, 1, 300), (2, 1, 2, 301)],
)

# By number of ranks, with layers that compute in float8, whose weights are gathered in float8.
IN_FLOAT8 = some(lambda: {"may_round": True}, [(4, 310)], (2, 163), (4, 219))

# By number of ranks, with unequal numbers of tokens: whole tensors, two optimizers and overflows,
# copies, offload, and two schedules of pipelines.
COUNTED = some(dict, [(2, 2006), (2, 2012), (2, 2042), (4, 2022)], (1, 2012), (4, 2016), (2, 2019))

# On GPUs by number of ranks, pipe_size and tp_size (None: drawn). Those of 340001 and 350003 have
# hung: in both a stage waited until the other one took the shapes of what it sends.
ON_GPUS = [(4, 2, 2, 340001), (4, None, 4, 350003), (4, 4, None, 330001), (2, 2, None, 200)]


# Of torch's reentrant checkpoint.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("world_size", "seed", "given"), [*CASES, *IN_FLOAT8, *COUNTED])
def test_a_random_training_equals_plain_torch(
    world_size: int, seed: int, given: dict[str, Any], tmp_path: Path
) -> None:
    if "may_round" in given:
        pytest.importorskip("torchao", reason="float8 layers are torchao's")
    plan = draw(seed, **given)
    assert differences(plan, world_size, str(tmp_path)) == [], plan


def test_trainings_have_what_they_are_for() -> None:
    for case in IN_FLOAT8:
        assert draw(case.values[1], may_round=True).float8 == "gathered"
    for case in COUNTED:
        plan = draw(case.values[1])
        assert plan.manages and (plan.counts if plan.pipeline is None else plan.pipeline.counts)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("world_size", "pp", "tp", "seed"),
    [pytest.param(*case, marks=pytest.mark.gpu(case[0])) for case in ON_GPUS],
)
def test_a_random_training_on_gpus_equals_plain_torch(
    world_size: int, pp: int | None, tp: int | None, seed: int, tmp_path: Path
) -> None:
    plan = draw(seed, tp, pp, whole_tensors=False)
    assert differences(plan, world_size, str(tmp_path), "cuda", timeout=120) == [], plan
