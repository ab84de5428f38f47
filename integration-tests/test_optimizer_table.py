"""A draw of the table of optimizers (optimizer_table.py): none trains another model without
a word.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from optimizer_trainings import Training, outcome_of

from bmt_testing import run_ranks

TORCH = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
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
RIGHT = {*TORCH, "Averaged", "KeepsNothing", "LogsLargest", "Plain", "Sign"} - {"Adafactor"}
NOT_KNOWN = {"Noisy"}


@pytest.mark.parametrize(
    ("ranks", "level", "dtype", "tp"),
    [(1, 3, "float32", 1), (2, 3, "bfloat16", 1), (2, 0, "float32", 1), (2, 2, "float64", 2)],
)
def test_no_optimizer_trains_another_model_without_a_word(
    ranks: int, level: int, dtype: str, tp: int
) -> None:
    drawn = random.Random(f"{ranks} {level} {dtype}").sample(ALL, 4)
    init = {"gradients": "mean", **({"tp_size": tp} if tp > 1 else {})}
    for kind, options in drawn:
        found: list[Training] = run_ranks(
            outcome_of, ranks, kind, options, getattr(torch, dtype), level, init=init, timeout=120
        )
        name = kind.partition(":")[2]
        assert len({(each.needs, each.result == "refused") for each in found}) == 1, found
        has_all_values = ranks == 1 or (level == 0 and tp == 1)
        if name in NOT_KNOWN:
            assert found[0].result == "warned" or has_all_values, (kind, found)
        elif name in RIGHT:
            assert all(each.result == "right" for each in found), (kind, found)
        elif not has_all_values or name in ("Rows", "Adafactor"):
            assert all(each.result == "refused" for each in found), (kind, found)
        else:
            assert all(each.result in ("right", "refused") for each in found), (kind, found)
