"""`bmt hang` names the rank that was killed or stopped, that left a call out or made another one,
and says so where nothing is wrong.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from faults import Fault, act
from torch import nn

import bmtrain as bmt
from bmt_core.cli import main
from bmt_core.comm import call_check, call_watch
from bmt_core.errors import CallError
from bmt_core.run import runtime
from bmt_testing import rank_pool

STEP, LAYER = 2, 1  # of the fault
TIMEOUT = 6.0  # seconds, for ranks that wait for one that is stopped


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def recorded_run(directory: Path) -> Iterator[None]:
    """A run that records its calls, and is watched ten times as often as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BMT_CALL_HISTORY", str(directory))
        patch.setattr(call_watch, "PERIOD", call_watch.PERIOD / 10)
        patch.setattr(call_watch, "LOOK_AFTER", call_watch.LOOK_AFTER / 10)
        patch.setattr(call_check, "_PIECE", call_check._PIECE / 10)
        runtime.init_distributed(device="cpu", timeout=TIMEOUT)
        try:
            yield
        finally:
            runtime.shutdown()


def train(directory: Path, fault: Fault | None = None) -> None:
    model = bmt.BMTrainModelWrapper(Model())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    for step in range(1, STEP + 2):
        x = torch.ones(2, 8)
        for index, layer in enumerate(model.layers):
            x = layer(x)
            if fault is not None and step == STEP and index == LAYER:
                x.register_hook(lambda _: act(fault, str(directory)))
        manager.backward(x.sum())
        manager.step()
        manager.zero_grad()


def train_with(directory: Path, fault: Fault | None) -> str:
    """Train, and return the error that ended it."""
    try:
        with recorded_run(directory):
            train(directory, fault)
    except CallError as error:
        return str(error)
    return ""


def killed_at_once(directory: Path) -> None:
    with recorded_run(directory):
        train(directory)
        bmt.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


def hang(directory: Path) -> Result:
    result = CliRunner().invoke(main, ["hang", str(directory)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result
    print(result.output)
    return result


def report_of(kind: str, ranks: int, directory: Path) -> str:
    """Let the last rank fail, and return what `bmt hang` says of it after the lines of ranks."""
    fault = Fault(kind=kind, rank=ranks - 1, step=STEP, layer=LAYER, in_backward=True)
    rank_pool(ranks).outcomes(train_with, directory, fault, init=None, timeout=120, grace=20)
    result = hang(directory)
    assert result.exit_code == 1
    found = result.output.partition("\n\n")
    assert len(re.findall(r"^Rank \d on ", found[0], re.MULTILINE)) == ranks
    return found[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["killed", "stopped", "skips", "shape"])
def test_the_rank_and_the_call_are_named(kind: str, ranks: int, tmp_path: Path) -> None:
    print(report_of(kind, ranks, tmp_path))
    assert 0
