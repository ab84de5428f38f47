"""``torchrun --nnodes 1:2`` on two hosts, which are namespaces of this machine: a host vanishes
while the example trains, and the other goes on alone from the latest checkpoint; the host comes
back, and both go on to the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import train as example
from bmt_testing import run_ranks
from hosts import Host, hosts, why_no_hosts

OPTIONS = (
    "--layers 2 --dim 32 --heads 2 --seq-len 32 --batch-size 8 --eval-windows 16 --warmup 2"
    " --sample-bytes 0 --device cpu --steps 6 --eval-every 1 --log-every 6 --checkpoint-every 2"
)
TIMEOUT = 10
PATIENCE = 300.0  # seconds, after which the test fails
# After how long torchrun counts a node as gone, and how long it waits for more than the fewest:
# minutes by default. A node that is only slow must not count as gone, or two runs train.
SOON = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": ":".join(sys.path),
    "PYTHONUNBUFFERED": "1",
    # With the store that torchrun shares with its ranks, torch 2.13 waits for a new agent in vain:
    # the one that has the store does not tell its address once more.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
# The ranks wait where something is to happen: for the test, which lets a host vanish after step 2,
# and for torchrun, which ends the rank that is alone when another host has come.
WAITING_TRAIN = f"""
import os, runpy, signal, sys
import bmtrain as bmt

save_checkpoint = bmt.save_checkpoint

def save_and_wait(*arguments, step, **options):
    path = save_checkpoint(*arguments, step=step, **options)
    print(f"saved step {{step}} on {{bmt.world_size()}} ranks", flush=True)
    if step == 4 or (step == 2 and os.uname().nodename == "host1"):
        signal.pause()
    return path

bmt.save_checkpoint = save_and_wait
sys.path.insert(0, {str(Path(example.__file__).parent)!r})
runpy.run_path({example.__file__!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_made() -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)


def options_of(out: Path) -> list[str]:
    """Return the command line of a training of six steps in ``out``."""
    return [*OPTIONS.split(), "--data", str(out.with_name("text.txt")), "--out", str(out)]


def start_agent(host: Host, first: Host, script: Path) -> subprocess.Popen[str]:
    """Start torchrun with one rank on ``host``; the agents of all hosts meet on ``first``."""
    options = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id example"
    options += f" --rdzv-backend c10d --rdzv-endpoint {first.address}:29500"
    options += f" --rdzv-conf is_host={int(host == first)},{SOON}"
    arguments = [*options_of(script.with_name("elastic")), "--timeout", str(TIMEOUT)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return subprocess.Popen(
        host.command([*torchrun, str(script), *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


def read_until(agent: subprocess.Popen[str], line: str) -> str:
    """Return what ``agent`` prints, with that of its rank, until ``line``."""
    assert agent.stdout is not None
    printed = ""
    while not printed.endswith(f"{line}\n"):
        read = agent.stdout.readline()
        assert read, printed
        printed += read
    return printed


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started, at once."""
    found = [process.pid]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def held_out_losses(out: Path) -> dict[int, float]:
    """Return the held-out losses of a run by step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record
    }


@pytest.mark.slow("bmt-core", "bmt-watch", "bmt-checkpoint", "examples/gpt/")
@pytest.mark.ranks(2)
def test_a_node_that_leaves_and_comes_again_changes_no_loss(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(Path(example.__file__).read_bytes() * 3)
    script = tmp_path / "train.py"
    script.write_text(WAITING_TRAIN)
    with hosts(2) as (first, second), contextlib.ExitStack() as ends:
        agent = start_agent(first, first, script)
        limit = threading.Timer(PATIENCE, kill, [agent])  # then nothing more is read from it
        ends.callback(limit.cancel)
        ends.callback(kill, agent)
        limit.start()
        leaving = start_agent(second, first, script)
        ends.callback(kill, leaving)
        printed = read_until(agent, "saved step 2 on 2 ranks")
        second.disconnect()
        kill(leaving)
        leaving.communicate()
        run_ranks(example.main, 1, options_of(tmp_path / "whole"), init=None, timeout=120)
        printed += read_until(agent, "saved step 4 on 1 ranks")
        second.reconnect()
        coming = start_agent(second, first, script)
        ends.callback(kill, coming)
        printed_too, _ = coming.communicate(timeout=PATIENCE)
        assert agent.stdout is not None
        printed += agent.stdout.read()
        assert (agent.wait(), coming.returncode) == (0, 0), f"{printed}\n{printed_too}"
    assert re.findall(r"^bmt: (\d+) rank", printed, re.MULTILINE) == ["2", "1", "2"]
    assert re.findall(r"going on after step (\d+)", printed) == ["2", "4"]
    expected = held_out_losses(tmp_path / "whole")
    assert list(expected) == list(range(7))
    assert held_out_losses(tmp_path / "elastic") == pytest.approx(expected, rel=1e-4)
