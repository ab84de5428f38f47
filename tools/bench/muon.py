"""``muon``: the step of Muon on whole tensors, beside plain torch's and beside Adam's.

Start it on one process, and with torchrun on several:

    python3 tools/bench muon --size 1b
    torchrun --standalone --nproc_per_node=2 tools/bench muon --size 1b
    torchrun --standalone --nproc_per_node=2 tools/bench muon --size 13b --layers 4

The optimizers step the matrices of the blocks of ``--size``, in float32, with gradients that are
there. "torch, one process" is ``torch.optim.Muon`` on the whole matrices, on rank 0 alone. "whole"
is ``bmt.optim.whole`` of it, for shards of level 3, and "DTensor" torch's Muon for shards of torch,
as FSDP2 makes them. A time is that of one step alone: the ranks begin together, with an idle
device, and end when their devices are done; it is the median of ``--rounds``, in which the cases of
Muon take turns, on the slowest rank. After the first step, values of "whole" must be those of
"torch, one process".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import bmtrain as bmt
from bench.device import free_memory, peak_gib, prepare, synchronize
from bench.fsdp2 import mesh_of
from bench.models import SEED, SIZES, Size, TransformerBlock, fill
from bench.ranks import gather_texts, largest
from bench.trace import write_trace

PLAIN, WHOLE, DTENSOR, ADAM = "Muon: torch, one process", "Muon: whole", "Muon: DTensor", "AdamW"
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
# Of the largest update; a product that is cut otherwise would be rounded otherwise in bfloat16.
TOLERANCE = 0.02

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one step: the median of the rounds and the quickest one, on the slowest rank; and
    the GiB that tensors held at most on one rank, those of the other cases included.
    """

    case: str
    size: str
    layers: int
    ranks: int
    elements: int
    seconds: float
    quickest: float
    of_plain: float
    """The time over that of plain torch's Muon."""
    peak: float | None


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table, on rank 0."""
    options = _parser().parse_args(arguments)
    bmt.init_distributed(device=options.device, check_calls=False)
    try:
        device = bmt.current().device
        prepare(device)
        found = SIZES[options.size]
        size = dataclasses.replace(found, num_layers=options.layers or found.num_layers)
        rows = list(_measure(size, device, options))
        if bmt.rank() == 0:
            print(_table(rows), flush=True)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(asdict(row)) + "\n" for row in rows]
                options.output.write_text("".join(lines))
    finally:
        bmt.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="1b", help="default: 1b")
    parser.add_argument("--layers", type=int, help="default: those of the size")
    parser.add_argument("--rounds", type=int, default=11, help="default: 11")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace of two steps of whole (.json.gz)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures here, one JSON object a line"
    )
    return parser


def _measure(size: Size, device: torch.device, options: argparse.Namespace) -> Iterator[Row]:
    blocks = _blocks(size, device)
    matrices = [p for block in blocks for p in block.parameters() if len(p.whole_shape) == 2]
    plain = [nn.Parameter(whole.clone()) for whole in map(_gathered, matrices)]
    cases = {PLAIN: _plain_step(plain), WHOLE: _whole_step(matrices)}
    if bmt.world_size() > 1:
        cases[DTENSOR] = _dtensor_step(plain, device)
    _give_gradients(matrices, plain, device)
    if bmt.rank() != 0:
        plain.clear()
        cases[PLAIN] = lambda: None
    before = [p.detach().clone() for p in plain]
    for run in cases.values():
        run()
    _check(matrices, plain, before)
    before.clear()
    found = _times(cases, device, options.rounds)
    if options.trace:
        write_trace(cases[WHOLE], options.trace)
    peaks = {name: peak_gib(device) for name in cases}
    cases.clear()
    plain.clear()
    free_memory(device, compiled=False)
    adam = bmt.optim.AdamW(matrices, **OPTIONS)
    found |= _times({ADAM: adam.step}, device, options.rounds)
    peaks[ADAM] = peak_gib(device)
    for name, seconds in found.items():
        yield Row(
            case=name,
            size=options.size,
            layers=size.num_layers,
            ranks=bmt.world_size(),
            elements=sum(p.whole_shape.numel() for p in matrices),
            seconds=statistics.median(seconds),
            quickest=min(seconds),
            of_plain=statistics.median(seconds) / statistics.median(found[PLAIN]),
            peak=_highest(peaks[name]),
        )


def _blocks(size: Size, device: torch.device) -> list[Any]:
    """Return the blocks of the model, sharded."""
    made = []
    for number, unit in enumerate(size.units(torch.float32)):
        if isinstance(unit, TransformerBlock):
            unit.to_empty(device=device)
            fill(unit, size, seed=SEED + number, rounded_to=torch.float32)
            made.append(bmt.Block(unit, zero_level=3, initialized=True))
    return made


def _gathered(p: Any) -> torch.Tensor:
    with torch.no_grad():
        whole: torch.Tensor = p.gather()
    return whole


def _plain_step(plain: Sequence[nn.Parameter]) -> Step:
    return torch.optim.Muon(plain, **OPTIONS).step


def _whole_step(matrices: Sequence[nn.Parameter]) -> Step:
    return bmt.optim.whole(
        torch.optim.Muon, matrices, cost=lambda shape: shape.numel() * min(shape), **OPTIONS
    ).step


def _dtensor_step(plain: Sequence[nn.Parameter], device: torch.device) -> Step:
    """Return the step of parameters that each rank has some rows of."""
    mesh = mesh_of(device)
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    for number, p in enumerate(sharded):
        p.grad = distribute_tensor(_gradient(number, p.shape, device), mesh, [Shard(0)])
    return torch.optim.Muon(sharded, **OPTIONS).step


def _give_gradients(
    matrices: Sequence[Any], plain: Sequence[nn.Parameter], device: torch.device
) -> None:
    for number, (p, whole) in enumerate(zip(matrices, plain, strict=True)):
        gradient = _gradient(number, whole.shape, device)
        p.grad = p.local_part(gradient).clone()
        if bmt.rank() == 0:
            whole.grad = gradient


def _gradient(number: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Return the gradient of matrix ``number``, the same on every rank."""
    generator = torch.Generator(device).manual_seed(SEED + number)
    return torch.randn(shape, generator=generator, device=device)


def _check(
    matrices: Sequence[Any], plain: Sequence[nn.Parameter], before: Sequence[torch.Tensor]
) -> None:
    """Raise on every rank if the matrices are not, but for rounding, what plain torch made of
    ``before``. Collective.
    """
    complaint = ""
    for number, p in enumerate(matrices):
        found = _gathered(p)
        if bmt.rank() != 0:
            continue
        update = (plain[number].detach() - before[number]).abs().max().item()
        difference = (plain[number].detach() - found).abs().max().item()
        if not difference <= TOLERANCE * update:
            complaint = f"matrix {number} differs by {difference:g} after an update of {update:g}"
    if complaints := [text for text in gather_texts(complaint) if text]:
        raise RuntimeError(f"{WHOLE} does not step as {PLAIN}: {complaints[0]}.")


def _times(cases: dict[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round of each case, on the slowest rank, after one round that does
    not count. Collective.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            synchronize(device)
            gather_texts("")  # the ranks begin together
            began = time.perf_counter()
            run()
            synchronize(device)
            seconds = largest([time.perf_counter() - began])
            if number:
                found[name] += seconds
    return found


def _highest(peak: tuple[float, float] | None) -> float | None:
    return None if peak is None else largest([peak[0]])[0]


def _table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        ["ms of a step", "median", "quickest", "over torch's Muon", "peak GiB"],
        ["---"] * 5,
        *(
            [
                row.case if row.case == PLAIN else f"{row.case}, ranks: {row.ranks}",
                f"{row.seconds * 1e3:.2f}",
                f"{row.quickest * 1e3:.2f}",
                f"{row.of_plain:.3f}",
                "" if row.peak is None else f"{row.peak:.1f}",
            ]
            for row in rows
        ),
    ]
    return "\n".join(
        [
            f"{first.size}, {first.layers} layers, {first.elements:,} elements of matrices",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )
