"""What a terminal shows when a program fails: a few lines of the program itself, and at last, in
torchrun's block, the error of the rank that failed first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

import torch
from torch import nn

import bmtrain as bmt


class Layer(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(features, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(features) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens_of(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def main(mistake: str) -> None:
    bmt.init_distributed(device="cpu", tp_size=3 if mistake == "grid" else 1)
    model = bmt.BMTrainModelWrapper(Model(features=32 if mistake == "shape" else 16))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if mistake == "checkpoint":
        bmt.load_checkpoint(sys.argv[2], model, manager)
    steps = 4 - (mistake == "uneven" and bmt.rank() == 1)
    for step in range(steps):
        fails_alone = mistake == "alone" and bmt.rank() == 1 and step == 2
        tokens_of("1 2 x" if fails_alone else "1 2 3")
        loss = model(torch.randn(4, 8)).square().mean()
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
    if mistake == "late":  # an error for which the program shuts down itself
        try:
            tokens_of("x")
        finally:
            bmt.shutdown()


main(sys.argv[1])
"""


def run(command: list[str], folder: Path, mistake: str, **environment: str) -> tuple[str, str]:
    """Start the program with ``mistake`` by ``command``, and return the standard errors: what
    stands above torchrun's own lines, and these.
    """
    script, runs = folder / "train.py", folder / "runs"
    script.write_text(PROGRAM)
    (runs / "step-5").mkdir(parents=True)
    ended = subprocess.run(
        [sys.executable, *command, str(script), mistake, str(runs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 1, ended.stderr
    above, mark, block = ended.stderr.partition(" failed (exitcode: ")
    return above.rpartition("\n")[0] if mark else above, block


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def calls_in(text: str) -> list[str]:
    return re.findall(r'File "([^"]*)", line', text)


SLOW = pytest.mark.slow("bmt-core", "bmt-watch", "bmt-zero", "bmt-checkpoint")
WRONG_SHAPE = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x16 and 32x8)"
MISTAKES = [
    pytest.param(
        "grid",
        2,
        "bmt.init_distributed(device=",
        "ConfigError: 2 ranks cannot be divided by tp_size=3. Change tp_size, or start a multiple"
        " of 3 ranks.",
        marks=SLOW,
    ),
    pytest.param(
        "uneven",
        2,
        "x = layer(x)",
        "CallError: Rank 1 has ended after 3 steps, and rank 0 waits for it in call",
        marks=SLOW,
    ),
    pytest.param(
        "checkpoint",
        2,
        "bmt.load_checkpoint(sys.argv[2], model, manager)",
        "There is no checkpoint in {runs}: neither a file 'latest' beside a"
        " directory that it names, nor a file training.pt. {runs} holds step-5. Name the directory",
        marks=SLOW,
    ),
    (
        "alone",
        2,
        "return [int(word) for word in line.split()]",
        "ValueError: invalid literal for int() with base 10: 'x'",
    ),
    pytest.param(
        "late",
        2,
        "return [int(word) for word in line.split()]",
        "ValueError: invalid literal for int() with base 10: 'x'",
        marks=SLOW,
    ),
    pytest.param("shape", 8, "return x + self.down(self.up(x).relu())", WRONG_SHAPE, marks=SLOW),
]


@pytest.mark.slow("bmt-core")
@pytest.mark.parametrize(("mistake", "ranks", "line", "error"), MISTAKES)
def test_a_mistake_takes_few_lines_and_torchrun_ends_with_it(
    mistake: str, ranks: int, line: str, error: str, tmp_path: Path
) -> None:
    above, block = run(torchrun(ranks), tmp_path, mistake)
    lines = above.splitlines()
    assert len(lines) <= (30 if ranks == 2 else 40), above
    assert {*calls_in(above)} == {str(tmp_path / "train.py")}, above
    assert "GLHF" not in above and "The above exception" not in above
    of_ranks = [
        [each for each in lines if each.startswith(f"[rank{rank}]: ")] for rank in range(ranks)
    ]
    failing = ranks - (mistake == "uneven")  # rank 1 ends well
    *others, whole = sorted(filter(None, of_ranks), key=len)
    assert [len(each) for each in others] == [1] * (failing - 1), above
    assert whole[0].endswith("Traceback (most recent call last):")
    assert all(lines.index(whole[-1]) < lines.index(one) for (one,) in others), above
    cause = block.partition("Root Cause (first observed failure):")[2]
    assert line in cause and error.format(runs=tmp_path / "runs") in cause, block
    assert calls_in(cause)[0] == str(tmp_path / "train.py") and "error_file: <N/A>" not in cause
    if mistake == "alone":
        assert "CallError: Rank 1 has failed (ValueError: invalid literal" in others[0][0]
    if mistake == "uneven":
        assert "give every rank the same number of them, for example by DistributedSampler" in cause


@SLOW
def test_all_calls_are_shown_if_asked_for(tmp_path: Path) -> None:
    above, _ = run(torchrun(2), tmp_path, "shape", BMT_TRACEBACK="full")
    files = " ".join(calls_in(above))
    assert "block_engine.py" in files and "torch/nn/modules/module.py" in files
    assert above.count(WRONG_SHAPE) == 2 == above.count("Traceback (most recent call last):")


def test_one_process_shows_its_own_lines(tmp_path: Path) -> None:
    above, _ = run([], tmp_path, "shape")
    assert {*calls_in(above)} == {str(tmp_path / "train.py")} and len(above.splitlines()) <= 15
    assert above.startswith("Traceback (most recent call last):\n")
    assert above.rstrip().endswith(WRONG_SHAPE)
