"""``PipelineTransformerBlockList`` against one process in plain torch."""

from __future__ import annotations

import pytest
import torch
from pipeline_trainings import compare, expected, listed, on_grid

from bmt_core import rank
from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import on_ranks
from bmt_zero import Block

# Micro-batches fewer than, as many as, and more than the stages.
RUNS = [
    ("pp 1", 2, 3, True),
    ("pp 2", 1, 3, True),
    ("pp 2", 2, 0, True),
    ("pp 2 x dp 2", 8, 1, False),
    ("pp 2 x dp 2", 4, 2, True),
    ("pp 4", 2, 3, False),
]


@pytest.mark.parametrize(("grid", "micro_batches", "level", "use_checkpoint"), RUNS)
def test_a_pipelined_list_trains_as_plain_torch(
    grid: str, micro_batches: int, level: int, use_checkpoint: bool
) -> None:
    wanted = expected(5)
    for record in on_grid(grid, listed, 5, level, use_checkpoint, micro_batches=micro_batches):
        compare(record, wanted)


@on_ranks(2, init={"pipe_size": 2})
def test_the_first_stages_get_one_layer_more() -> None:
    layers = PipelineTransformerBlockList([torch.nn.Linear(2, 2) for _ in range(5)])
    of_stages = [[0, 1, 2], [3, 4]]
    assert [layers.get_range_by_stage_id(stage) for stage in range(2)] == of_stages
    assert [layers.get_part_len_by_stage_id(stage) for stage in range(2)] == [3, 2]
    assert [layers.get_stage_by_layer_id(layer) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert layers.layer_ids == of_stages[rank()]
    assert (layers.stages, layers.stage_id, layers.pipe_idx) == (2, rank(), 0)


@on_ranks(2)
def test_with_one_stage_too_a_block_must_be_one_of_a_stage() -> None:
    for member in (Block(torch.nn.Linear(2, 2)), lambda: Block(torch.nn.Linear(2, 2))):
        with pytest.raises(AssertionError, match='must be made with mode="PIPE"'):
            PipelineTransformerBlockList([member])
