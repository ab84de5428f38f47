"""Warnings show the line of the user's program, not one of torch or of bmt."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from cells import run_cells


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.linear(x)]


def step_of_sums() -> None:
    model = bmt.BMTrainModelWrapper(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps the step
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def skipped_step() -> None:
    model = bmt.BMTrainModelWrapper(nn.Linear(4, 4))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    manager.backward(model(torch.full((1, 4), torch.inf)).sum())
    manager.step()


def returned_list() -> None:
    block = bmt.Block(Layer())
    block(torch.ones(1, 4))


def assigned_setting() -> None:
    bmt.config.zero_size = 3


def undecided_weight_decay() -> None:
    bmt.optim.create("adam", nn.Linear(4, 4).parameters(), weight_decay=0.1)


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "gradients that are sums over 2 ranks": (step_of_sums, "optimizer.step()"),
    "step skipped": (skipped_step, "manager.step()"),
    "returned a list": (returned_list, "block(torch.ones(1, 4))"),
    "adds it to their gradients": (
        undecided_weight_decay,
        'bmt.optim.create("adam", nn.Linear(4, 4).parameters(), weight_decay=0.1)',
    ),
    "was assigned": (assigned_setting, "bmt.config.zero_size = 3"),
}


def lines_of(text: str) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CASES[text][0]()
    found: list[Any] = [warning for warning in caught if text in str(warning.message)]
    return [
        (warning.filename, linecache.getline(warning.filename, warning.lineno).strip())
        for warning in found
    ]


def test_a_warning_shows_the_line_of_the_user() -> None:
    for (text,), found in run_cells(lines_of, 2, zip(CASES)):
        assert found[0] == [(__file__, CASES[text][1])]


OF_THE_PACKAGE = """
from bmt_core.user_warnings import warn_user
def work():
    warn_user("careful", FutureWarning)
"""


def test_frames_of_our_packages_are_skipped() -> None:
    names: dict[str, Any] = {"__name__": "bmt_zero.made_up"}
    exec(compile(OF_THE_PACKAGE, "made_up.py", "exec"), names)
    with pytest.warns(FutureWarning, match="careful") as caught:
        names["work"]()
    assert [warning.filename for warning in caught] == [__file__]
