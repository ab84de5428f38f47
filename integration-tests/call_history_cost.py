"""What recording calls costs: `python integration-tests/call_history_cost.py [ranks] [device]`.

Steps with and without BMT_CALL_HISTORY, and without what is always kept of each call, take turns in
one run: of a small model, 4 linear layers of 64 x 64 as Blocks at ZeRO level 3. On the CPU ranks
compare their calls in each of them. Prints the medians, the medians of the differences of
neighbours, also of the time for which the main thread had a core, which other work on the machine
changes less, how many calls a step makes, and the microseconds of a call on a GPU, in a loop.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bmtrain as bmt
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_watch.call_check import FIRST_CALLS

STEPS = 1000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def microseconds_of_steps(device: str, directory: str) -> dict[str, float]:
    os.environ["BMT_CALL_HISTORY"] = directory
    runtime.init_distributed(device=device)
    run: Any = bmt.current()
    model = bmt.BMTrainModelWrapper(Model().to(run.device))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    batch = torch.ones(16, 64, device=run.device)
    log = run.observer.log
    in_file, in_memory = log._memory, bytearray(log._memory)
    ways = ("recorded", "kept", "nothing")

    def step(way: str) -> tuple[float, float]:
        """Make a step; return its microseconds, and those for which this thread had a core."""
        log._memory = in_file if way == "recorded" else in_memory
        vars(log).pop("add", None)
        if way == "nothing":
            log.add = noted(log)
        begin, own_begin = time.perf_counter(), time.thread_time()
        manager.zero_grad()
        manager.backward(model(batch).sum())
        manager.step()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        own_end = time.thread_time()
        return 1e6 * (time.perf_counter() - begin), 1e6 * (own_end - own_begin)

    for _ in range(100):
        step("recorded")
    before = log.serial
    step("recorded")
    calls = log.serial - before
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(STEPS):
        first = number % len(ways)
        rounds.append({way: step(way) for way in (*ways[first:], *ways[:first])})
    vars(log).pop("add", None)
    on_device = {
        f"on a GPU, {way}": microseconds_on_device(run, log, memory)
        for way, memory in (("recorded", in_file), ("kept", in_memory))
    }
    runtime.shutdown()
    steps = {way: statistics.median(each[way][0] for each in rounds) for way in ways}
    return {
        **on_device,
        "calls in a step": calls,
        **{f"median step, {way}": steps[way] for way in ways},
        **{
            f"{way} beside {other}, {what}": statistics.median(
                each[way][index] - each[other][index] for each in rounds
            )
            for way, other in itertools.pairwise(ways)
            for index, what in enumerate(("median", "main thread"))
        },
        "median step / 200 (0.5 %)": steps["kept"] / 200,
    }


def noted(log: Any) -> Callable[..., int]:
    """Return what counts calls, and keeps nothing of them."""

    def add(group: int, number: int, text: object, first: int) -> int:
        log.numbers[group] = number or log.numbers[group]
        log.serial += 1
        serial: int = log.serial
        return serial

    return add


def microseconds_on_device(run: Any, log: Any, memory: Any) -> float:
    """Of what the host does in a call on a GPU after the first ones, without the call itself."""
    calls, tensor = run.observer.group("device", run.world.ranks), torch.ones(4096)
    log._memory = memory
    for _ in range(FIRST_CALLS):
        calls.enter_on_device(("all_gather",), tensor)

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(20_000):
            calls.enter_on_device(("all_reduce", "sum", torch.bfloat16), tensor)
        return (time.perf_counter() - begin) / 20_000

    return 1e6 * min(seconds() for _ in range(20))


def main(ranks: str = "2", device: str = "cpu") -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = run_ranks(
            microseconds_of_steps, int(ranks), device, directory, init=None, timeout=600
        )[0]
        for what, number in found.items():
            print(f"{what:35} {number:9.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
