"""`bmt hang` names the rank that was killed or stopped, that left a call out or made another one,
and says so where nothing is wrong.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from faults import Fault, act
from torch import nn

import bmtrain as bmt
from bmt_core.errors import CallError
from bmt_core.run import runtime
from bmt_testing import rank_pool
from bmt_watch import call_watch
from bmt_watch.call_log import RankCalls
from bmtrain._program import main

STEP, LAYER = 2, 1  # of the fault
MADE = r", made in the backward of layers\.\d"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


SLOW = pytest.mark.slow("bmt-core", "bmt-watch")


@contextmanager
def recorded_run(directory: Path) -> Iterator[None]:
    """A run that records its calls, and is watched ten times as often as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BMT_CALL_HISTORY", str(directory))
        patch.setattr(call_watch, "PERIOD", call_watch.PERIOD / 10)
        patch.setattr(call_watch, "LOOK_AFTER", call_watch.LOOK_AFTER / 10)
        patch.setattr(call_watch, "WARN_AFTER", call_watch.WARN_AFTER / 10)
        runtime.init_distributed(device="cpu", timeout=300)
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
                x.register_hook(lambda _: happen(fault, directory))
        manager.backward(x.sum())
        manager.step()
        manager.zero_grad()


def happen(fault: Fault, directory: Path) -> None:
    if fault.kind == "stopped" and bmt.rank() == 0:
        call_watch.logger.addHandler(HangReader(fault.rank, directory))
    act(fault, str(directory))


class HangReader(logging.Handler):
    """Runs `bmt hang` when a rank has warned that it waits, and then ends the one that is
    stopped.
    """

    def __init__(self, stopped: int, directory: Path) -> None:
        super().__init__()
        self._stopped, self._directory = stopped, directory

    def emit(self, record: logging.LogRecord) -> None:
        call_watch.logger.removeHandler(self)
        (self._directory / "said").write_text(said_by_hang(self._directory))
        (file,) = self._directory.glob(f"*/rank-{self._stopped}.calls")
        os.kill(RankCalls.read(file).process, signal.SIGKILL)


def said_by_hang(directory: Path, exit_code: int = 1) -> str:
    """Return what `bmt hang` says of the newest run: lines of groups and ranks, an empty line, and
    what is wrong.
    """
    result = CliRunner().invoke(main, ["hang", str(directory)])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def train_with(directory: Path, fault: Fault | None) -> str:
    """Train, and return the error that ended it."""
    try:
        with recorded_run(directory):
            train(directory, fault)
    except CallError as error:
        return str(error)
    return ""


def killed_together(directory: Path) -> None:
    with recorded_run(directory):
        train(directory)
        bmt.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("killed", 2),
        ("skips", 2),
        *[pytest.param(*case, marks=SLOW) for case in (("stopped", 4), ("skips", 4), ("shape", 2))],
    ],
)
def test_the_rank_and_the_call_are_named(kind: str, ranks: int, tmp_path: Path) -> None:
    """The last rank fails in the backward of a layer, after the reduction of the layer above."""
    last = ranks - 1
    fault = Fault(kind=kind, rank=last, step=STEP, layer=LAYER, in_backward=True)
    rank_pool(ranks).outcomes(train_with, tmp_path, fault, init=None, timeout=120, grace=20)
    said = (tmp_path / "said").read_text() if kind == "stopped" else said_by_hang(tmp_path)
    print(said)
    states, _, problems = said.partition("\n\n")
    others = "rank 0" if ranks == 2 else f"ranks 0-{last - 1}"
    in_step = rf"^Rank \d on \S+, process \d+: in .*step {STEP}, "
    assert len(re.findall(in_step, states, re.MULTILINE)) == ranks
    if kind in ("killed", "stopped"):
        # Ranks that entered the call after their last sign of life are not known to wait.
        assert re.match(
            rf"{others.capitalize()} entered call \d+ of group dp/main/0 \(ranks [\d, ]+\):"
            rf" all_gather torch.float32, 512 bytes, for layers.0.weight{MADE}, \d+.\d s before the"
            r" last sign of life\."
            rf"|Ranks? [\d, -]+ waits? for \d+.\d s in call \d+ of group dp/main/0 .*: all_gather"
            rf" torch.float32, 512 bytes, for layers.0.weight{MADE}\.",
            problems,
        ), problems
        assert re.search(
            rf" It waits for rank {last}, whose last call was call \d+ of group dp/reduce/0 .*:"
            rf" reduce_scatter sum torch.float32, \d+ bytes, for gradients of layers.2.weight{MADE}"
            rf" \(it has made none for \d s, and is in step {STEP}\).*\. Nothing was heard of rank"
            rf" {last} for .* or it is stopped\.",
            problems.partition("\n")[0],
        ), problems
        group = rf"^Group dp/main/0 .*: {others} entered call \d+, rank {last} did not.$"
    else:
        own = (
            "all_gather torch.float32, 512 bytes"
            if kind == "skips"
            else "all_reduce sum torch.float32, 20 b"
        )
        # The error may end a slow rank before it enters the call.
        some = others if ranks == 2 else "ranks? [0-2, -]+"
        assert re.match(
            r"Ranks have entered different calls: call \d+ of group dp/main/0 \(ranks .*\) is on"
            rf" rank \d, in step {STEP}, at [\d:]+: all_reduce sum torch.float32, 16 bytes{MADE};"
            rf" on rank {last}, in step {STEP}, at [\d:]+: {own}",
            problems,
        ), problems
        entered = rf"all entered call \d+, the last|{some}.* entered call \d+, {some} did not"
        group = rf"^Group dp/main/0 of ranks 0-{last}: (?:{entered}).$"
    assert re.search(group, states, re.MULTILINE), states


def test_nothing_is_wrong_with_a_run_that_ended_or_was_killed_as_a_whole(tmp_path: Path) -> None:
    assert rank_pool(2).run(train_with, tmp_path / "ended", None, init=None) == ["", ""]
    said = said_by_hang(tmp_path / "ended", exit_code=0)
    assert said.endswith("\n\nNothing is wrong: all ranks ended without an error.\n")
    assert said.count("no error") == 2 and "did not" not in said
    outcomes = rank_pool(2).outcomes(killed_together, tmp_path / "killed", init=None)
    assert [outcome.error_type for outcome in outcomes] == ["Died", "Died"]
    said = said_by_hang(tmp_path / "killed", exit_code=0)
    assert "\n\nNo rank keeps others waiting in a collective call; sends and receives" in said
