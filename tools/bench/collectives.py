"""``collectives``: the native NCCL backend beside torch's process group, in one run; start it
with torchrun.

For n ranks and a buffer of S bytes that takes t, bandwidth is that of each rank's link: S/t · (n −
1)/n for all_gather and reduce_scatter (S is the whole buffer), twice that for all_reduce, S/t for
broadcast and exchange. Both take turns; figures are medians on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bmt_core
from bmt_core.comm import Group, TorchGroup, Work
from bmt_core.run.runtime import current

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_fp32_sum",
    "all_reduce",
    "broadcast",
    "exchange",
)
LATENCIES = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
BANDWIDTHS = (1 << 26, 1 << 28, 1 << 30)
_CALLS = {True: 50, False: 5}  # back to back, for latencies and for bandwidths


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one operation on one size: a call that is waited for, and one of many back
    to back.
    """

    operation: str
    ranks: int
    bytes: int
    alone: float
    torch_alone: float
    in_row: float
    torch_in_row: float
    bandwidth: float
    torch_bandwidth: float


def main(arguments: Sequence[str]) -> int:
    """Measure and print one table, on rank 0."""
    options = _parser().parse_args(arguments)
    bmt_core.init_distributed(comm_backend=options.backend, device=options.device)
    try:
        ours = current().world
        if ours.size == 1:
            print("Communication needs several ranks. Start with torchrun --nproc_per_node=N.")
            return 1
        process_group: Any = dist.new_group(
            list(ours.ranks), backend="nccl" if options.device == "cuda" else "gloo"
        )
        theirs = TorchGroup(ours.ranks, ours.rank, process_group, process_group)
        rows = []
        for operation in options.operations.split(","):
            for size in (int(text) for text in options.sizes.split(",")):
                rows.append(_measure(operation, size, ours, theirs, options.rounds))
                if ours.rank == 0:
                    print(_line(rows[-1], is_first=len(rows) == 1), flush=True)
        if options.output and ours.rank == 0:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    finally:
        bmt_core.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench collectives", description=__doc__)
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="default: all")
    sizes = ",".join(map(str, (*LATENCIES, *BANDWIDTHS)))
    parser.add_argument("--sizes", default=sizes, help=f"bytes (default: {sizes})")
    parser.add_argument(
        "--rounds", type=int, default=9, help="measurements of each, taking turns (default: 9)"
    )
    parser.add_argument(
        "--backend", default="nccl-native", help="what is beside torch's (default: nccl-native)"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program out")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures here, one JSON object a line"
    )
    return parser


def _measure(operation: str, size: int, ours: Group, theirs: Group, rounds: int) -> Row:
    device = current().device
    starts = [_prepare(operation, size, group, device) for group in (ours, theirs)]
    count = _CALLS[size <= max(LATENCIES)]
    alone: list[list[float]] = [[], []]
    in_row: list[list[float]] = [[], []]
    for warm_up in (True, *[False] * rounds):
        for index, start in enumerate(starts):
            times = _seconds(start, 1, ours, device), _seconds(start, count, ours, device)
            if not warm_up:
                alone[index].append(times[0])
                in_row[index].append(times[1])
    medians = [statistics.median(seconds) for seconds in (*alone, *in_row)]
    slowest = torch.tensor(medians, dtype=torch.float64)
    ours.all_reduce(slowest, "max").wait()
    t = slowest.tolist()
    wire = size * _factor(operation, ours.size)
    return Row(
        operation=operation,
        ranks=ours.size,
        bytes=size,
        alone=t[0],
        torch_alone=t[1],
        in_row=t[2],
        torch_in_row=t[3],
        bandwidth=wire / t[2],
        torch_bandwidth=wire / t[3],
    )


def _seconds(start: Callable[[], Work], calls: int, group: Group, device: torch.device) -> float:
    """Seconds per call, of ranks that begin together."""
    group.all_reduce(torch.zeros(1)).wait()  # on the host
    began = time.perf_counter()
    for _ in range(calls):
        start().wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / calls


def _prepare(operation: str, size: int, group: Group, device: torch.device) -> Callable[[], Work]:
    dtype = torch.bfloat16
    whole = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    part = torch.zeros(whole.numel() // group.size, dtype=dtype, device=device)
    whole = whole[: part.numel() * group.size]
    if operation == "all_gather":
        return lambda: group.all_gather(whole, part)
    if operation == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole)
    if operation == "reduce_scatter_fp32_sum":
        total = torch.zeros(part.numel(), device=device)
        return lambda: group.reduce_scatter(total, whole)
    if operation == "all_reduce":
        return lambda: group.all_reduce(whole)
    if operation == "broadcast":
        return lambda: group.broadcast(whole)
    if operation == "exchange":
        received = torch.zeros_like(whole)
        following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        return lambda: group.exchange([(whole, following)], [(received, previous)])
    raise SystemExit(f"No operation is named {operation!r}. Known: {', '.join(OPERATIONS)}.")


def _factor(operation: str, ranks: int) -> float:
    if operation in ("broadcast", "exchange"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def _line(row: Row, *, is_first: bool) -> str:
    cells = [row.operation, str(row.bytes)]
    cells += [
        f"{seconds * 1e6:.1f}"
        for seconds in (row.alone, row.torch_alone, row.in_row, row.torch_in_row)
    ]
    cells += [f"{bandwidth / 1e9:.1f}" for bandwidth in (row.bandwidth, row.torch_bandwidth)]
    cells += [f"{row.torch_alone / row.alone:.2f}", f"{row.torch_in_row / row.in_row:.2f}"]
    header = [
        "operation",
        "bytes",
        "alone us",
        "torch",
        "in a row us",
        "torch",
        "GB/s",
        "torch",
        "speed alone",
        "in a row",
    ]
    lines = [header, ["---"] * len(header)] if is_first else []
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, cells])
