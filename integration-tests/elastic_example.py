"""A node leaves while the example trains, and another comes: ``torchrun --nnodes 1:2`` goes on with
the ranks that are there.

Two agents of torchrun on this machine stand for two nodes; with ``--hosts`` each runs on a host of
its own (``tools/hosts.py``). When the first checkpoint is there, one agent and its ranks are
killed, with ``--hosts`` after the cable of its host was pulled out. The ranks of the other one end,
with ``--hosts`` after their timeout, and it goes on after the latest checkpoint with half as many.
Then an agent comes again, and both go on with all ranks to the end, which must have the losses of a
run that one process made without a break.

python3 tools/dev.py setup && .venv/bin/python integration-tests/elastic_example.py --hosts
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from hosts import Host, hosts

TRAIN = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"
SIZES = (
    "--layers 2 --dim 32 --heads 2 --seq-len 32 --eval-windows 16 --max-bytes 300000 --warmup 2"
    " --sample-bytes 0 --device cpu"
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# With the store that torchrun shares with its ranks, torch 2.13 waits for a new agent in vain: the
# one that has the store does not tell its address once more.
ENVIRONMENT["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
PATIENCE = 300.0  # seconds
# How soon torchrun counts a node as gone, and how long it waits for more than the fewest: minutes
# by default. A node that is only slow must not count as gone, or two runs train.
SOON = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5"


def main() -> int:
    """Train twice, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800, help="of the training")
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two nodes")
    parser.add_argument("--hosts", action="store_true", help="each node on a host of its own")
    options = parser.parse_args()
    script = [
        str(TRAIN),
        *SIZES.split(),
        "--batch-size",
        str(4 * options.ranks),
        "--steps",
        str(options.steps),
    ]
    script += ["--eval-every", "50", "--log-every", "50"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        whole, elastic = Path(folder) / "whole", Path(folder) / "elastic"
        subprocess.run(
            [sys.executable, *script, "--out", str(whole)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        made = stack.enter_context(hosts(2)) if options.hosts else [None, None]
        script += ["--checkpoint-every", "10", "--timeout", "20", "--out", str(elastic)]
        training = Training(script, options.ranks, elastic, made)
        with training:
            seconds = training.run()
        output = training.output
        steps = re.findall(r"going on after step (\d+)", output)
        worlds = re.findall(r"^bmt: (\d+) rank", output, flags=re.MULTILINE)
        expected, losses = held_out_losses(whole), held_out_losses(elastic)
    print(
        f"ranks {' then '.join(worlds)}; going on after steps {' and '.join(steps)};"
        f" {seconds[0]:.1f} s from the kill until the rest went on, {seconds[1]:.1f} s from the"
        " start of the new agent until all did"
    )
    print(f"held-out losses {losses}, of one process {expected}")
    numbers = [2 * options.ranks, options.ranks, 2 * options.ranks]
    is_right = len(steps) == 2 and worlds == list(map(str, numbers))
    is_right = is_right and losses.keys() == expected.keys()
    is_right = is_right and all(abs(losses[step] - expected[step]) < 1e-3 for step in expected)
    print("right" if is_right else "WRONG")
    return 0 if is_right else 1


class Training:
    """The example on two nodes, of which one leaves and comes again. ``made`` are their hosts, None
    for this machine.
    """

    def __init__(
        self, script: Sequence[str], ranks: int, out: Path, made: Sequence[Host | None]
    ) -> None:
        self._script, self._ranks, self._out, self._hosts = script, ranks, out, made
        self._printed = out.with_name("printed")
        self._nodes: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self._port = free.getsockname()[1]

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self._nodes:
            kill(node)
            node.wait()

    def run(self) -> tuple[float, float]:
        """Train to the end; return the seconds until training went on, after the node had left and
        after it had come again.
        """
        self._start(0)
        self._start(1)
        self._wait_until(lambda: (self._out / "checkpoints" / "latest").exists())
        if (host := self._hosts[1]) is not None:
            host.disconnect()
        kill(self._nodes.pop())
        left = time.monotonic()
        self._wait_until(lambda: self._read().count("going on after step") == 1)
        went_on = time.monotonic()
        if host is not None:
            host.reconnect()
        self._start(1)
        self._wait_until(lambda: self._read().count("going on after step") == 2)
        seconds = went_on - left, time.monotonic() - went_on
        for node in self._nodes:
            if node.wait(PATIENCE):
                raise SystemExit(f"a node ended with {node.returncode}:\n{self._read()}")
        self.output = self._read()
        return seconds

    def _start(self, number: int) -> None:
        """Start an agent of torchrun. What the first one prints is read, what the other one prints
        is kept for errors.
        """
        host = self._hosts[number]
        address = "localhost" if self._hosts[0] is None else self._hosts[0].address
        options = f"--nnodes 1:2 --nproc-per-node {self._ranks} --max-restarts 3 --rdzv-id example"
        options += f" --rdzv-backend c10d --rdzv-endpoint {address}:{self._port}"
        options += f" --rdzv-conf is_host={int(number == 0)},{SOON}"
        command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *self._script]
        printed = self._printed if number == 0 else self._printed.with_name("printed-too")
        with open(printed, "w") as output:
            node = subprocess.Popen(
                command if host is None else host.command(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                text=True,
            )
        self._nodes.append(node)

    def _read(self) -> str:
        return self._printed.read_text()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so()``; raise if a node ends before."""
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            ended = [node.returncode for node in self._nodes if node.poll() is not None]
            if ended or time.monotonic() > deadline:
                too = self._printed.with_name("printed-too").read_text()
                raise SystemExit(
                    f"it did not come; nodes ended with {ended}:\n{self._read()}\n{'-' * 80}\n{too}"
                )
            time.sleep(0.05)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started, at once."""
    found = [process.pid]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    for pid in found if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def held_out_losses(out: Path) -> dict[int, float]:
    """Return the held-out losses of a run by step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record
    }


if __name__ == "__main__":
    sys.exit(main())
