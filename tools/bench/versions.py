"""``versions``: steps of two versions of bmt and of plain torch, in turns, on one rank.

A step of small layers takes as long as the host takes, and a shared host may be slower by a quarter
from one second to the next, so that figures of two runs cannot be compared. Here each of the three
trains in a process of its own, and they take turns, some steps at a time, in an order that is
drawn. A version's own part is what it adds to torch's time at the same place among all turns: at
the fastest, at the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import bmt_core
import bmtrain as bmt
from bench.device import prepare, synchronize
from bench.options import OURS, Options
from bench.toolkits import TOOLKITS
from bench.training import make_batch

PLACES = {"fastest": 0.0, "first quarter": 0.25, "median": 0.5, "third quarter": 0.75}
_WORKERS = {"torch": "torch", "before": OURS, "now": OURS}


def main(arguments: Sequence[str]) -> int:
    """Take the turns and print a table of milliseconds a step."""
    parser = argparse.ArgumentParser(
        prog="bench versions",
        description=__doc__,
        epilog="All other options are those of measure; --steps are those of a turn.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--before",
        required=True,
        metavar="PATHS",
        help="where the older version's packages are, as PYTHONPATH names them",
    )
    parser.add_argument("--turns", type=int, default=14, help="of each process (default: 14)")
    parser.add_argument("--train", choices=_WORKERS.values(), help=argparse.SUPPRESS)
    own, others = parser.parse_known_args(arguments)
    options = Options.parse(others)
    if own.train is not None:
        _train(dataclasses.replace(options, toolkits=(own.train,)))
        return 0
    with ExitStack() as stack:
        workers = {name: _Worker(name, own.before, arguments) for name in _WORKERS}
        for worker in workers.values():
            stack.callback(worker.end)
        for worker in workers.values():
            print(f"{worker.name}: bmt of {worker.answer()}", flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        draw = random.Random(0)
        for _ in range(own.turns):
            for name in draw.sample([*workers], len(workers)):
                seconds[name].append(workers[name].take_turn())
    print(_table(seconds, options.cases()[0].gpt.num_layers), flush=True)
    return 0


class _Worker:
    """A process that trains when it is told to."""

    def __init__(self, name: str, before: str, arguments: Sequence[str]) -> None:
        self.name = name
        paths = [before] if name == "before" else []
        paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
        command = [sys.executable, str(Path(__file__).parent), "versions", *arguments]
        self._process: Any = subprocess.Popen(
            [*command, "--train", _WORKERS[name]],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take_turn(self) -> float:
        """Return the seconds of a step."""
        with suppress(BrokenPipeError):  # it has ended, and does not answer
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return float(self.answer())

    def answer(self) -> str:
        """Return the line that the process writes next."""
        line: str = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process that trains by {self.name} has ended: see its error.")
        return line.strip()

    def end(self) -> None:
        """Let the process end, after the steps that it is in."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def _train(options: Options) -> None:
    """Train with the only toolkit of ``options``: some steps for each line of the standard input,
    whose seconds are written.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed is no answer
    bmt.init_distributed(device=options.device)
    device = bmt.current().device
    prepare(device)
    case = options.cases()[0]
    training = TOOLKITS[case.toolkit](case, device)
    batch = make_batch(case.gpt, batch=case.batch, rank=0, device=device)
    for _ in range(case.warmup):
        training.step(*batch)
    print(Path(bmt_core.__file__).parent, file=answers)
    for _ in sys.stdin:
        training.step(*batch)  # the first one after a pause
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(case.steps):
            training.step(*batch)
        synchronize(device)
        print((time.perf_counter() - begin) / case.steps, file=answers)
    training.close()
    bmt.shutdown()


def _table(seconds: dict[str, list[float]], layers: int) -> str:
    lines = [
        "| of all turns | torch, ms | before, ms | now, ms | own part of a layer, before, ms | now,"
        " ms | now / before |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for place, share in PLACES.items():
        torch, before, now = (
            1e3 * sorted(each)[int(share * (len(each) - 1))] for each in seconds.values()
        )
        own = (before - torch) / layers, (now - torch) / layers
        lines.append(
            f"| {place} | {torch:.2f} | {before:.2f} | {now:.2f} | {own[0]:.3f} | {own[1]:.3f} |"
            f" {own[1] / own[0]:.3f} |"
        )
    return "\n".join(lines)
