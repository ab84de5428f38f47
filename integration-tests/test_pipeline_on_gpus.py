"""Pipelines over NCCL, against one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
from delays import PLACES, Where, delayed
from pipeline_trainings import Record, compare, expected, listed, on_grid, scheduled
from test_pipeline_step import FORMS

pytestmark = pytest.mark.gpu(2)
LAYERS = 9


def delayed_training(where: Where, *arguments: Any) -> Record:
    layers, level, form = arguments
    schedule, options = FORMS[form]
    with delayed(where):
        return scheduled(layers, level, False, schedule, 4, **options)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("form", ["gpipe", "1f1b", "zero-bubble, v"])
def test_delays_change_nothing(form: str, where: Where) -> None:
    for record in on_grid(
        "pp 2", delayed_training, where, LAYERS, 1, form, init={"device": "cuda"}
    ):
        compare(record, expected(LAYERS))


@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_pipelined_list_trains_as_plain_torch(
    micro_batches: int, level: int, backend: str
) -> None:
    init = {"device": "cuda", "comm_backend": backend}
    for record in on_grid("pp 2", listed, 5, level, True, micro_batches=micro_batches, init=init):
        compare(record, expected(5))


@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_by_any_schedule_is_that_of_plain_torch(
    form: str, use_checkpoint: bool, backend: str
) -> None:
    schedule, options = FORMS[form]
    init = {"device": "cuda", "comm_backend": backend}
    for record in on_grid(
        "pp 2", scheduled, LAYERS, 3, use_checkpoint, schedule, 8, init=init, **options
    ):
        compare(record, expected(LAYERS))


@pytest.mark.gpu(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("grid", "backend"), [("pp 4", "torch"), ("pp 4", "nccl-native"), ("pp 2 x dp 2", "torch")]
)
def test_on_four_gpus(grid: str, backend: str, form: str) -> None:
    schedule, options = FORMS[form]
    init = {"device": "cuda", "comm_backend": backend}
    for record in on_grid(grid, scheduled, LAYERS, 3, True, schedule, 8, init=init, **options):
        compare(record, expected(LAYERS))
