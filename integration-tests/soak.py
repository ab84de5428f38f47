"""Train for thousands of steps, in which blocks are frozen, levels change, gradients accumulate and
checkpoints are loaded at random: the losses stay those of plain torch, and the memory stays as it
was.

    python integration-tests/soak.py --steps 10000 --ranks 4

prints a line for each tenth of the steps: the largest difference of a loss from that of plain torch
in one process, and the memory of the ranks' processes; then by how much the memory grows, with the
standard error, and every warning of bmt's core, such as one of a call that waits. The exit status
is 1 if a loss differs, memory grows, or there is a warning.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import statistics
import sys
import tempfile
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import bmtrain as bmt
from bmt_testing import rank_pool

LAYERS, WIDTH, ROWS = 4, 12, 4
LARGEST_DIFFERENCE = 1e-7
"""Of a loss in float64; rounding grows over thousands of steps."""
LARGEST_GROWTH = 96 << 10
"""Bytes in 1,000 steps by which memory may grow, beside :data:`STANDARD_ERRORS` of its growth:
safetensors 0.8.0 keeps two integers of each tensor that it reads, here some 50 kB.
"""
STANDARD_ERRORS = 3
_MEASURE_EVERY = 20  # steps
_WINDOWS = 20
"""Parts of the last two thirds of a run. Neighbouring measurements depend on each other, medians of
parts less, which have the standard error.
"""
_LIBC = ctypes.CDLL(None)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step does. ``frozen`` are layers; ``level``, if there is one, is the new ZeRO level
    of a layer.
    """

    micro_batches: int
    frozen: frozenset[int]
    level: tuple[int, int] | None
    is_saved: bool
    is_resumed: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """The losses of all steps, the memory of the process in bytes, every so many steps, and what
    bmt has warned of. The arrays have their whole length at the start, so that they do not grow.
    """

    losses: array[float]
    memory: array[int]
    warnings: list[str]


def draw(steps: int, seed: int) -> list[Step]:
    """Draw what every step does."""
    random_ = random.Random(seed)
    frozen: frozenset[int] = frozenset()
    found = []
    for number in range(steps):
        if random_.random() < 0.05:
            frozen = frozenset(n for n in range(LAYERS) if random_.random() < 0.3)
        changes_level = random_.random() < 0.05
        is_saved = number > 0 and random_.random() < 0.01
        found.append(
            Step(
                micro_batches=random_.choice([1, 1, 1, 2, 3]),
                frozen=frozen,
                level=(random_.randrange(LAYERS), random_.randint(1, 3)) if changes_level else None,
                is_saved=is_saved,
                is_resumed=is_saved and random_.random() < 0.5,
            )
        )
    return found


class Model(nn.Module):
    """Layers between two matrices outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Tanh(), nn.Linear(2 * WIDTH + 1, WIDTH)
            )
            for _ in range(LAYERS)
        )
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def plain_model(seed: int, device: str) -> Model:
    torch.manual_seed(seed)
    return Model().double().to(device)


def batch(step: int, micro: int, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of all ranks; the targets follow from the inputs."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    return x.to(device), x[:, :3].sin().to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def freeze(model: nn.Module, frozen: frozenset[int]) -> None:
    for number, layer in enumerate(model.get_submodule("layers").children()):
        layer.requires_grad_(number not in frozen)


def memory(device: str) -> int:
    """Return the bytes of this process, and those that torch has allocated on its GPU. What C's
    allocator keeps for later does not count.
    """
    gc.collect()
    _LIBC.malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return resident + (torch.cuda.memory_allocated() if device == "cuda" else 0)


def train_plain(steps: Sequence[Step], seed: int, rows: int, device: str) -> list[float]:
    """Train in this process, without bmt; return the losses."""
    model = plain_model(seed, device)
    optimizer = optimizer_of(model)
    losses = []
    for number, step in enumerate(steps):
        freeze(model, step.frozen)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(step.micro_batches):
            x, target = batch(number, micro, rows, device)
            loss = nn.functional.mse_loss(model(x), target) / step.micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def start(seed: int, device: str) -> tuple[nn.Module, bmt.optim.OptimManager]:
    """Return a sharded model, and the manager of its optimizer."""
    model = bmt.BMTrainModelWrapper(plain_model(seed, device))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer_of(model))
    return model, manager


def train(steps: Sequence[Step], seed: int, device: str, folder: str) -> Found:
    """Train on this rank."""
    measurements = -(-len(steps) // _MEASURE_EVERY)
    found = Found(
        losses=array("d", bytes(8 * len(steps))),
        memory=array("q", bytes(8 * measurements)),
        warnings=[],
    )
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bmt_core").addHandler(handler)
    model, manager = start(seed, device)
    for number, step in enumerate(steps):
        if step.is_saved:
            bmt.save_checkpoint(folder, model, manager, step=number, keep=2)
        if step.is_resumed:
            del model, manager
            model, manager = start(seed + number, device)
            assert bmt.load_checkpoint(folder, model, manager)["step"] == number
        if step.level is not None:
            layer, level = step.level
            model.get_submodule("layers")[layer]._zero_level = level  # type: ignore[index]
        freeze(model, step.frozen)
        manager.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro in range(step.micro_batches):
            parts = [
                each.chunk(bmt.world_size())[bmt.rank()]
                for each in batch(number, micro, ROWS * bmt.world_size(), device)
            ]
            is_last = micro == step.micro_batches - 1
            with nullcontext() if is_last else bmt.no_sync(model):
                loss = nn.functional.mse_loss(model(parts[0]), parts[1]) / step.micro_batches
                manager.backward(loss)
            total += loss.detach()
        manager.step()
        found.losses[number] = bmt.sum_loss(total).item()
        if number % _MEASURE_EVERY == 0:
            found.memory[number // _MEASURE_EVERY] = memory(device)
    return found


def growth(found: Sequence[int]) -> tuple[float, float]:
    """Return by how many bytes memory grows in 1,000 steps of the last two thirds, and the standard
    error: of the line by least squares through the medians of :data:`_WINDOWS` parts.

    >>> growth(range(0, 900 * _MEASURE_EVERY, _MEASURE_EVERY))
    (1000.0, 0.0)
    """
    size = len(found) * 2 // 3 // _WINDOWS
    first = len(found) - size * _WINDOWS
    y = [statistics.median(found[begin : begin + size]) for begin in range(first, len(found), size)]
    x = [number * size * _MEASURE_EVERY / 1000 for number in range(_WINDOWS)]
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = statistics.variance(x) * (_WINDOWS - 1)
    return slope, (rest / (_WINDOWS - 2) / spread) ** 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 2 * _WINDOWS * _MEASURE_EVERY:
        parser.error(f"--steps must be at least {2 * _WINDOWS * _MEASURE_EVERY}")
    steps = draw(options.steps, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        ranks = rank_pool(options.ranks).run(
            train,
            steps,
            options.seed,
            options.device,
            folder,
            timeout=60 + options.steps,
            init={"device": options.device},
        )
    rows = ROWS * options.ranks
    expected = train_plain(steps, options.seed, rows, options.device)
    differences = [
        max(abs(found.losses[number] - loss) for found in ranks)
        for number, loss in enumerate(expected)
    ]
    saved, resumed = (
        sum(map(flag, steps)) for flag in (lambda s: s.is_saved, lambda s: s.is_resumed)
    )
    print(f"{options.steps} steps on {options.ranks} ranks, {saved} saved, {resumed} resumed")
    print("| steps | loss | largest difference | MiB of each rank |")
    print("|---|---|---|---|")
    tenth = max(1, options.steps // 10)
    for first in range(0, options.steps, tenth):
        end = min(first + tenth, options.steps)
        sizes = [
            statistics.median(found.memory[first // _MEASURE_EVERY : 1 + end // _MEASURE_EVERY])
            for found in ranks
        ]
        print(
            f"| {first} to {end} | {expected[end - 1]:.4f} | {max(differences[first:end]):.1e}"
            f" | {', '.join(f'{size / 2**20:.1f}' for size in sizes)} |"
        )
    grown = [growth(found.memory) for found in ranks]
    print(
        "growth in 1,000 steps, KiB:",
        ", ".join(f"{slope / 1024:.1f} ± {error / 1024:.1f}" for slope, error in grown),
    )
    warned = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found.warnings]
    print(f"{len(warned)} warnings", *warned, sep="\n")
    grows = any(slope > LARGEST_GROWTH + STANDARD_ERRORS * error for slope, error in grown)
    return 1 if max(differences) > LARGEST_DIFFERENCE or grows or warned else 0


if __name__ == "__main__":
    sys.exit(main())
