"""A draw of the table of optimizers (optimizer_table.py): none trains another model without
a word.
"""

from __future__ import annotations

import csv
import random
from typing import Any

import pytest
import torch
from optimizer_table import CSV, FOUND, classes, expected_values
from optimizer_trainings import Case, Training, outcomes_of

from bmt_testing import run_ranks

TORCH = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]
ODD = {
    "Averaged": {"inner": True},
    "GlobalClip": {},
    "KeepsNothing": {"total": 3},
    "LaterNorm": {},
    "LogsLargest": {},
    "Mean": {},
    "Noisy": {},
    "Norm": {},
    "Plain": {},
    "Quantised": {},
    "Rows": {},
    "Sharpness": {"base_optimizer": ("torch.optim", "SGD"), "lr": 0.05},
    "Sign": {"lr": 0.003},
    "StepSizeFromAll": {},
}
ALL: list[tuple[str, dict[str, Any]]] = [
    *[(f"torch.optim:{name}", {}) for name in TORCH],
    *[(f"odd_optimizers:{name}", options) for name, options in ODD.items()],
]
NOT_KNOWN = {"Noisy"}
WHOLE = {"Adafactor", "LaterNorm", "Mean", "Norm", "Quantised", "Rows"}
TOGETHER = {"GlobalClip", "StepSizeFromAll"}
REFUSED = {"Sharpness"}  # needs all tensors, and a closure


@pytest.mark.parametrize(
    ("ranks", "level", "dtype", "tp"),
    [
        (2, 3, "bfloat16", 1),
        (2, 0, "float32", 1),
        pytest.param(2, 2, "float64", 2, marks=pytest.mark.slow("bmt-optim", "bmt-params")),
    ],
)
def test_no_optimizer_trains_another_model_without_a_word(
    ranks: int, level: int, dtype: str, tp: int
) -> None:
    drawn = random.Random(f"{ranks} {level} {dtype}").sample(ALL, 3)
    init = {"gradients": "mean", **({"tp_size": tp} if tp > 1 else {})}
    has_all_values = ranks == 1 or (level == 0 and tp == 1)
    for kind, options in drawn:
        name = kind.partition(":")[2]
        ways = ["manager", *(["whole"] if name in WHOLE else ["together"] * (name in TOGETHER))]
        cases = [Case(dtype=getattr(torch, dtype), level=level, way=way) for way in ways]
        found: list[list[Training]] = run_ranks(
            outcomes_of,
            ranks,
            kind,
            options,
            cases,
            expected_values(kind, options, [getattr(torch, dtype)]),
            init=init,
            timeout=120,
        )
        results = [{of_rank[i].result for of_rank in found} for i in range(len(ways))]
        assert len({of_rank[0].needs for of_rank in found}) == 1, (kind, found)
        if name in NOT_KNOWN:
            assert found[0][0].result == "warned" or has_all_values, (kind, found)
        elif name in REFUSED:
            assert results[0] == {"refused"}, (kind, found)
        elif name in TOGETHER:
            assert results[0] == {"right" if has_all_values else "refused"}, (kind, found)
        else:
            assert results[0] == {"right"}, (kind, found)
        assert results[1:] in ([], [{"right"}]), (kind, found)


def test_the_table_has_the_optimizers_of_torch_and_what_each_was_found_to_be() -> None:
    with CSV.open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = {f"{row['module']}:{row['class']}": row["found"] for row in rows}
    assert len(table) == len(rows) > 200
    known = {*FOUND.values(), "needs all tensors, and a closure", "not tried"}
    assert set(table.values()) <= known
    assert {kind for kind, _ in classes() if kind.startswith("torch.optim:")} <= table.keys()
    for name in TORCH:
        expected = "needs whole tensors" if name in WHOLE else "elementwise"
        assert table[f"torch.optim:{name}"] == expected
