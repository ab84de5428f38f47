"""``train_step`` under every schedule against one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_trainings import compare, expected, on_grid, scheduled

LAYERS = 9
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("gpipe", {}),
    "1f1b": ("1f1b", {}),
    "interleaved": ("interleaved", {"chunks": 2}),
    "gpipe, two chunks": ("gpipe", {"chunks": 2}),
    "zero-bubble": ("zero-bubble", {}),
    "zero-bubble, v": ("zero-bubble", {"chunks": 2, "placement": "v"}),
}


@pytest.mark.parametrize(("grid", "micro_batches"), [("pp 2", 1), ("pp 4", 2), ("pp 2 x dp 2", 8)])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_by_any_schedule_is_that_of_plain_torch(form: str, grid: str, micro_batches: int) -> None:
    schedule, options = FORMS[form]
    wanted = expected(LAYERS)
    for record in on_grid(grid, scheduled, LAYERS, 3, True, schedule, micro_batches, **options):
        compare(record, wanted)
