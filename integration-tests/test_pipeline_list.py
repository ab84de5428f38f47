"""``PipelineTransformerBlockList`` against one process in plain torch."""

from __future__ import annotations

import pytest
from pipeline_trainings import compare, expected, listed, on_grid

# Micro-batches fewer than, as many as, and more than the stages.
RUNS = [("pp 1", 2), ("pp 2", 1), ("pp 2", 2), ("pp 2 x dp 2", 8), ("pp 4", 2), ("pp 4", 4)]


@pytest.mark.parametrize(("grid", "micro_batches"), RUNS)
def test_a_pipelined_list_trains_as_plain_torch(grid: str, micro_batches: int) -> None:
    wanted = expected(5)
    for record in on_grid(grid, listed, 5, 3, True, micro_batches=micro_batches):
        compare(record, wanted)


@pytest.mark.parametrize(("level", "use_checkpoint"), [(0, True), (1, False), (2, True), (3, False)])
def test_at_every_level(level: int, use_checkpoint: bool) -> None:
    wanted = expected(4)
    for record in on_grid("pp 2 x dp 2", listed, 4, level, use_checkpoint, micro_batches=4):
        compare(record, wanted)
