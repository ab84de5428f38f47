"""``train_step`` under every schedule against one process in plain torch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pipeline_trainings import Record, compare, expected, on_grid, scheduled

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


def compiled() -> Record:
    """Train with compiled layers, which are traced and differentiated as usual and run as they are."""
    compile = torch.compile
    torch.compile = functools.partial(compile, backend="aot_eager")  # type: ignore[assignment]
    try:
        return scheduled(2, 3, True, "zero-bubble", 4, compile=True)
    finally:
        torch.compile = compile


def test_compiled_layers_train_as_plain_torch() -> None:
    for record in on_grid("pp 2", compiled, timeout=120):
        compare(record, expected(2))
