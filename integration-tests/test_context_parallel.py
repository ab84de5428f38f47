"""A sequence that is divided over ranks (bmt-cp) trains as in one process of plain torch."""

from __future__ import annotations

from functools import partial

import pytest
from context_models import Model, batch

from bmt_testing import TrainingSettings, assert_matches_single

GRIDS = [
    TrainingSettings(ranks=2, axes={"cp": 2}, gradients="sum", levels=(3,), recompute=(True,)),
    TrainingSettings(ranks=4, axes={"cp": 4}, gradients="sum", levels=(0, 1, 2), max_norm=0.1),
    TrainingSettings(
        ranks=4, axes={"cp": 2}, gradients="sum", levels=(2, 3), optimizer="adam", micro_batches=2,
        recompute=(True, False), keep="attention", reload=True,
    ),
    TrainingSettings(
        ranks=4, axes={"cp": 2}, gradients="sum", levels=(3, 1), shard_size=1, no_sync=True,
        micro_batches=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["causal", "odd length", "full", "window", "documents"])
@pytest.mark.parametrize("settings", GRIDS, ids=repr)
def test_a_training_is_that_of_one_process(settings: TrainingSettings, kind: str) -> None:
    assert_matches_single(partial(Model, kind), partial(batch, kind), settings=settings, steps=5)


@pytest.mark.parametrize("kind", ["causal", "odd length", "window"])
def test_a_training_with_a_pipeline_is_that_of_one_process(kind: str) -> None:
    settings = TrainingSettings(
        ranks=4, axes={"cp": 2, "pp": 2}, gradients="sum", levels=(3,), recompute=(True,)
    )
    assert_matches_single(
        partial(Model, kind), partial(batch, kind), settings=settings, steps=5, pipeline="layers"
    )
