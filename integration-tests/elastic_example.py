"""A node leaves while the example trains: ``torchrun --nnodes 1:2`` starts it again on the ranks
that are left, and it ends there.

Two agents of torchrun on this machine stand for two nodes. When the first checkpoint is there, one
agent and its ranks are killed. The other one goes on after the latest checkpoint with half as many
ranks, and must end with the losses of a run that one process made without a break.

python3 tools/dev.py setup && .venv/bin/python integration-tests/elastic_example.py
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
from typing import IO

TRAIN = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"
SIZES = (
    "--layers 2 --dim 32 --heads 2 --seq-len 32 --eval-windows 16 --max-bytes 300000 --warmup 2"
    " --sample-bytes 0 --device cpu"
)
PATIENCE = 300.0  # seconds
# How soon torchrun counts a node as gone, and how long it waits for more than the fewest: minutes
# by default.
SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"


def main() -> int:
    """Train twice, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of the training")
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two nodes")
    options = parser.parse_args()
    script = [
        str(TRAIN),
        *SIZES.split(),
        "--batch-size",
        str(4 * options.ranks),
        "--steps",
        str(options.steps),
    ]
    script += ["--checkpoint-every", "5", "--eval-every", "10", "--log-every", "5"]
    with tempfile.TemporaryDirectory() as folder:
        whole, elastic = Path(folder) / "whole", Path(folder) / "elastic"
        subprocess.run(
            [sys.executable, *script, "--out", str(whole)], check=True, stdout=subprocess.DEVNULL
        )
        output, seconds = train_while_a_node_leaves(
            [*script, "--out", str(elastic)], options.ranks, elastic
        )
        found = re.search(r"going on after step (\d+)", output)
        worlds = re.findall(r"^bmt: (\d+) rank", output, flags=re.MULTILINE)
        expected, losses = held_out_losses(whole), held_out_losses(elastic)
    print(
        f"ranks {' then '.join(worlds)}; after step {found and found[1]}; {seconds:.1f} s from the"
        " kill to the end"
    )
    print(f"held-out losses {losses}, of one process {expected}")
    is_right = found is not None and worlds == [str(2 * options.ranks), str(options.ranks)]
    is_right = is_right and losses.keys() == expected.keys()
    is_right = is_right and all(abs(losses[step] - expected[step]) < 1e-3 for step in expected)
    print("right" if is_right else "WRONG")
    return 0 if is_right else 1


def train_while_a_node_leaves(script: Sequence[str], ranks: int, out: Path) -> tuple[str, float]:
    """Return what the node printed that was left, and the seconds from the other's end to
    its own.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as printed:
        nodes = [start_node(script, ranks, port, is_host=True, output=printed)]
        nodes.append(start_node(script, ranks, port, is_host=False, output=subprocess.DEVNULL))
        try:
            wait_until(lambda: (out / "checkpoints" / "latest").exists(), nodes)
            kill(nodes[1])
            start = time.monotonic()
            code = nodes[0].wait(PATIENCE)
            seconds = time.monotonic() - start
            printed.seek(0)
            output = printed.read()
            if code != 0:
                raise SystemExit(f"the node that was left ended with {code}:\n{output}")
            return output, seconds
        finally:
            for node in nodes:
                if node.poll() is None:
                    kill(node)
                node.wait()


def start_node(
    script: Sequence[str], ranks: int, port: int, *, is_host: bool, output: IO[str] | int
) -> subprocess.Popen[str]:
    """Start an agent of torchrun."""
    options = (
        f"--nnodes 1:2 --nproc-per-node {ranks} --max-restarts 3 --rdzv-id example"
        " --rdzv-backend c10d"
    )
    options += f" --rdzv-endpoint localhost:{port} --rdzv-conf is_host={int(is_host)},{SOON}"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, text=True
    )


def kill(node: subprocess.Popen[str]) -> None:
    """Kill an agent and its ranks at once."""
    ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for pid in [node.pid, *map(int, ranks)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], nodes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until ``is_so()``; raise if a node ends before."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        ended = [node.returncode for node in nodes if node.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise SystemExit(f"no checkpoint was written; nodes ended with {ended}")
        time.sleep(0.05)


def held_out_losses(out: Path) -> dict[int, float]:
    """Return the held-out losses of a run by step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record
    }


if __name__ == "__main__":
    sys.exit(main())
