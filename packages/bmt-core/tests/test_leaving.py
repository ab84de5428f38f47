"""The end of a run: nothing of torch's works on behind it, and a rank that failed leaves without
the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

from bmt_core.errors import NotInitializedError
from bmt_core.run import runtime
from bmt_testing import run_ranks


def threads_of_gloo() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if (task / "comm").read_text().strip() == "pt_gloo_runloop"}


def engines_before_and_after() -> tuple[bool, bool]:
    # Of a run that failed in this process before: its group is leaked on purpose.
    earlier = threads_of_gloo()
    runtime.init_distributed(device="cpu")
    world = runtime.current().world
    tensors = torch.ones(2), torch.ones(4)
    for work in (
        world.all_reduce(tensors[0]),
        world.all_gather(tensors[1], tensors[0]),
        world.reduce_scatter(*tensors),
        world.reduce_scatter(torch.ones(2, dtype=torch.float64), tensors[1]),
        world.broadcast(tensors[0]),
    ):
        work.wait()
    before = bool(threads_of_gloo() - earlier)
    runtime.shutdown()
    after = bool(threads_of_gloo() - earlier)
    with pytest.raises(NotInitializedError, match="given back by shutdown"):
        world.all_reduce(tensors[0])
    return before, after


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_threads_of_torch_end_with_the_run_though_somebody_keeps_a_group() -> None:
    assert run_ranks(engines_before_and_after, 2, init=None) == [(True, False)] * 2


def memory_after_waiting() -> list[bool]:
    runtime.init_distributed(device="cpu")
    world = runtime.current().world
    whole, part = torch.ones(4), torch.ones(2)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (whole, part)]
    world.all_gather(whole, part).wait()
    del whole, part
    deadline = time.monotonic() + 10
    while any(storage() is not None for storage in storages) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's thread lets go a moment after the caller has waited
    runtime.shutdown()
    return [storage() is None for storage in storages]


def test_a_group_keeps_nothing_of_a_collective_that_was_waited_for() -> None:
    assert run_ranks(memory_after_waiting, 2, init=None) == [[True, True]] * 2


PROGRAM = """
import sys
import torch
from bmt_core.run import runtime
runtime.init_distributed(sys.argv[1], device="cpu")
world = runtime.current().world
if runtime.rank() == 0:
    world.all_reduce(torch.ones(1000))
    raise ValueError("no luck")
sys.stdin.read()
world.all_reduce(torch.ones(1000)).wait()
"""


@pytest.mark.slow("bmt-core", "bmt-watch")
@pytest.mark.ranks(2)
def test_a_rank_that_failed_leaves_without_the_others_whose_last_line_names_it() -> None:
    port = 20000 + os.getpid() % 12000  # no other process gets it, as it could one that is free

    def start(rank: int) -> subprocess.Popen[str]:
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
        }
        command = [sys.executable, "-c", PROGRAM, f"tcp://127.0.0.1:{port}"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    failing, other = start(0), start(1)
    try:
        _, errors = failing.communicate(timeout=60)
        assert failing.returncode == 1
        assert "ValueError: no luck" in errors and "terminate" not in errors
        assert other.poll() is None
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 1
        last_line = errors.strip().splitlines()[-1]
        assert "CallError: Rank 0 has failed (ValueError: no luck)." in last_line, errors
    finally:
        failing.kill()
        other.kill()
