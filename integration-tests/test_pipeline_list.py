"""``PipelineTransformerBlockList`` against one process in plain torch."""

from __future__ import annotations

import pytest
from pipeline_trainings import GRIDS, compare, expected, listed, on_grid


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_pipelined_list_trains_as_plain_torch(grid: str, micro_batches: int) -> None:
    wanted = expected(5)
    for record in on_grid(grid, listed, 5, 3, True, micro_batches=micro_batches):
        compare(record, wanted)


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_at_every_level(level: int, use_checkpoint: bool) -> None:
    wanted = expected(4)
    for record in on_grid("pp 2 x dp 2", listed, 4, level, use_checkpoint, micro_batches=4):
        compare(record, wanted)
