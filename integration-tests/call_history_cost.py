"""What recording calls costs: `python integration-tests/call_history_cost.py [ranks] [device]`.

Steps with and without BMT_CALL_HISTORY, and without what is always kept of each call, take turns in
one run: of a small model, 4 linear layers of 64 x 64 as Blocks at ZeRO level 3. On the CPU ranks
compare their calls in each of them. Prints the medians, the medians of the differences of
neighbours, also of the time for which the main thread had a core, which other work on the machine
changes less, how many calls a step makes, and the microseconds of one recorded call, in a step and
in a loop.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

import bmtrain as bmt
from bmt_core.comm.annotate import PLACES
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_watch.call_check import FIRST_CALLS
from bmt_watch.call_history import CallHistory
from bmt_watch.rank_states import Call

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
    history = run.observer.log.history

    observed = run.observer._groups
    is_cpu, places = run.device.type == "cpu", PLACES
    comparisons = {calls: comparison_alone(calls) for calls in observed}
    ways = ("recorded", "kept", "nothing")

    def step(way: str) -> tuple[float, float]:
        """Make a step; return its microseconds, and those for which this thread had a core."""
        for calls in observed:
            calls._history = history if way == "recorded" else None
            replace_methods(calls, comparisons[calls] if is_cpu and way == "nothing" else {})
            calls.is_closed = not is_cpu and way == "nothing"
        replace_methods(places, NO_PLACES if is_cpu and way == "nothing" else {})
        begin, own_begin = time.perf_counter(), time.thread_time()
        manager.zero_grad()
        manager.backward(model(batch).sum())
        manager.step()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        own_end = time.thread_time()
        return 1e6 * (time.perf_counter() - begin), 1e6 * (own_end - own_begin)

    spent: list[float] = []
    enter = history.enter

    def timed_enter(*arguments: Any) -> int:
        begin = time.perf_counter()
        record: int = enter(*arguments)
        spent.append(1e6 * (time.perf_counter() - begin))
        return record

    for _ in range(100):
        step("recorded")
    history.enter = timed_enter  # in a step, what it needs is in no cache
    for _ in range(200):
        step("recorded")
    history.enter = enter
    before = history._serial
    step("recorded")
    calls = history._serial - before
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(STEPS):
        first = number % len(ways)
        rounds.append({way: step(way) for way in (*ways[first:], *ways[:first])})
    step("kept")
    on_device = microseconds_on_device(run)
    runtime.shutdown()
    steps = {way: statistics.median(each[way][0] for each in rounds) for way in ways}
    return {
        **on_device,
        "calls in a step": calls,
        "a recorded call in a step": statistics.median(spent),
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


def comparison_alone(calls: Any) -> dict[str, Any]:
    """Return methods with which ``calls`` compares calls on the CPU, and keeps nothing of them."""
    call = Call(group=calls._name, ranks=calls._ranks, number=0, text="")
    fields = vars(call)

    def next_call(text: str, compared: str) -> Call:
        fields["number"], fields["text"] = calls._calls.number + 1, text
        return call

    def has_entered(call: Call, compared: str, first: object) -> None:
        calls._calls.number = call.number

    return {"_next_call": next_call, "_has_entered": has_entered}


NO_PLACES = {"enter": lambda place: None}
"""Of what keeps where in the model this rank computes."""


def replace_methods(of: Any, methods: dict[str, Any]) -> None:
    """Let ``of`` have these of the methods that are ever replaced, and otherwise its class's."""
    for name in ("_next_call", "_has_entered", "enter"):
        vars(of).pop(name, None)
    vars(of).update(methods)


def microseconds_on_device(run: Any) -> dict[str, float]:
    """Of what the host does in a call on a GPU after the first ones, without the call itself."""
    calls, tensor = run.observer.group("device", run.world.ranks), torch.ones(4096)
    for _ in range(FIRST_CALLS):
        calls.enter_on_device(("all_gather",), tensor)

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(20_000):
            calls.enter_on_device(("all_reduce", "sum", torch.bfloat16), tensor)
        return (time.perf_counter() - begin) / 20_000

    recorded = 1e6 * min(seconds() for _ in range(20))
    calls._history = None
    return {"on a GPU, recorded": recorded, "not recorded": 1e6 * min(seconds() for _ in range(20))}


def microseconds_of_a_call(directory: str) -> dict[str, float]:
    history = CallHistory(directory, "alone", rank=0, world_size=1, period=1.0)
    group, text = history.add_group("dp/main/0", range(8)), b"all_gather, 16384 bytes, for layers"

    def seconds() -> float:
        begin = time.perf_counter()
        for number in range(1, 20_001):
            history.enter(group, number, text, 20)
        return (time.perf_counter() - begin) / 20_000

    return {"a recorded call in a loop": 1e6 * min(seconds() for _ in range(20))}


def main(ranks: str = "2", device: str = "cpu") -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = run_ranks(
            microseconds_of_steps, int(ranks), device, directory, init=None, timeout=600
        )[0]
        for what, number in {**found, **microseconds_of_a_call(directory)}.items():
            print(f"{what:35} {number:9.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
