"""``kernels``: the compiled kernels beside torch's, and beside a copy of memory, on one device."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

import bmt_core
from bench.kernel_adam import adam_cases
from bench.kernel_cross_entropy import cross_entropy_cases
from bench.kernel_gradients import gradient_cases
from bench.kernel_timing import Result, measure
from bmt_kernels import CpuKernels, CudaKernels

_GROUPS = {"adam": adam_cases, "gradients": gradient_cases, "cross-entropy": cross_entropy_cases}


def main(arguments: Sequence[str]) -> int:
    """Measure and print one table per group of cases."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    provider = CudaKernels() if device.type == "cuda" else CpuKernels()
    if (reason := provider.available()) is not None:
        print(f"The kernels for {device.type} cannot be used: {reason}.")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    # A run, because modules such as FusedCrossEntropy take their kernels from it.
    bmt_core.init_distributed(device=device)
    print(_title(device))
    results: list[Result] = []
    for group in options.groups.split(","):
        for cases in _GROUPS[group](provider, device, int(float(options.elements)), options):
            found = measure(cases, device, options.rounds)
            print(f"\n{_table(found)}", flush=True)
            results += found
    bmt_core.shutdown()
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            "".join(json.dumps(result.as_record()) + "\n" for result in results)
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench kernels", description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument("--elements", default="1e8", help="of Adam and of gradients (default: 1e8)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="measurements of each case, taking turns (default: 15)",
    )
    parser.add_argument(
        "--threads", type=int, help="on the CPU, for all cases alike (default: torch's)"
    )
    parser.add_argument(
        "--groups", default=",".join(_GROUPS), help=f"any of {', '.join(_GROUPS)} (default: all)"
    )
    parser.add_argument("--rows", type=int, default=16384, help="of logits (default: 16384)")
    parser.add_argument(
        "--classes", default="32000,128000", help="of logits (default: 32000,128000)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures here, one JSON object a line"
    )
    return parser


def _title(device: torch.device) -> str:
    software = f"torch {torch.__version__}, bmt-kernels {version('bmt-kernels')}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {software}"
    module = CpuKernels().binary
    kind = getattr(module, "instruction_set")()  # noqa: B009  # only the module for the CPU has it
    return f"{platform.machine()} ({kind}), {torch.get_num_threads()} threads, {software}"


def _table(results: Sequence[Result]) -> str:
    header = ["case", "ms", "quickest", "GB/s", "of a copy"]
    header += (
        [f"speed to {results[0].peer}", "of the quickest", "extra MiB"]
        if results[0].peer
        else ["extra MiB"]
    )
    rows = [header, ["---"] * len(header)]
    for result in results:
        row = [result.name, f"{result.seconds * 1e3:.3f}", f"{result.quickest * 1e3:.3f}"]
        row += (
            [f"{result.bandwidth / 1e9:.0f}", _ratio(result.of_copy)] if result.moved else ["", ""]
        )
        row += [_ratio(result.of_peer), _ratio(result.quickest_of_peer)] if result.peer else []
        rows.append(
            [*row, "" if result.extra_bytes is None else f"{result.extra_bytes / 2**20:.0f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"
