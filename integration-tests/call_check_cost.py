"""What comparing collectives between ranks costs: `python integration-tests/call_check_cost.py
[ranks] [rounds] [device]`.

Rounds with and without the comparison take turns on the same processes. Of each, the fastest and
the median time are printed: of one all-reduce of 1000 numbers, and of one training step of a small
model (8 linear layers as Blocks, ZeRO level 3).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import bmtrain as bmt
from bmt_testing import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def seconds_of(action: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def measured() -> tuple[list[float], list[float]]:
    device = bmt.current().device
    world, x = bmt.current().world, torch.ones(1000, device=device)
    model = bmt.BMTrainModelWrapper(Model().to(device))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    batch = torch.ones(16, 256, device=device)

    def step() -> None:
        manager.zero_grad()
        manager.backward(model(batch).sum())
        manager.step()

    seconds_of(step, 3)
    return seconds_of(lambda: world.all_reduce(x).wait(), 300), seconds_of(step, 20)


def main(ranks: str = "2", rounds: str = "4", device: str = "cpu") -> None:
    found: dict[bool, tuple[list[float], list[float]]] = {True: ([], []), False: ([], [])}
    for _ in range(int(rounds)):
        for checks in (True, False):
            collectives, steps = run_ranks(
                measured, int(ranks), init={"device": device, "check_calls": checks}, timeout=600
            )[0]
            found[checks][0].extend(collectives)
            found[checks][1].extend(steps)
    for place, what in enumerate(("all-reduce", "training step")):
        for checks in (True, False):
            times = [1e6 * seconds for seconds in found[checks][place]]
            name = "compared" if checks else "not compared"
            print(
                f"{what:14} {name:13} fastest {min(times):9.0f} us, median"
                f" {statistics.median(times):9.0f} us"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
