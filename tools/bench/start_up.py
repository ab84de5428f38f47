"""``start-up``: what a training takes before its second step, by phase, in a fresh process; start
it with torchrun, once for each toolkit.

The model is built on the device "meta", sharded there, and gets its first values in shards. Seconds
are those of the slowest rank, from the start of its process. The host's memory is the highest of
the process so far, the device's the highest of tensors so far, both of the rank that has most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOOLKITS = ("bmt", "fsdp2")
_MOST = 0.1
"""A phase that takes a larger share is marked in the table."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase: its seconds, and the highest GiB on the host and the device at its end."""

    name: str
    seconds: float
    host: float
    device: float


def main(arguments: Sequence[str]) -> int:
    """Measure one toolkit, and print a table on rank 0."""
    parser = argparse.ArgumentParser(prog="bench start-up", description=__doc__)
    parser.add_argument("--toolkit", choices=TOOLKITS, default="bmt")
    parser.add_argument("--size", default="13b", help="of tools/bench measure (default: 13b)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default: 1)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of computation")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="add the figures here, one JSON object a line"
    )
    options = parser.parse_args(arguments)
    phases = (_bmt if options.toolkit == "bmt" else _fsdp2)(options)
    if os.environ.get("RANK", "0") == "0":
        print(_table(options, phases), flush=True)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            record = vars(options) | {"output": None, "phases": [asdict(p) for p in phases]}
            with options.output.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return 0


class _Clock:
    """Runs phases one after the other, and notes what each has taken."""

    def __init__(self) -> None:
        self._last = _process_start()
        self.phases: list[Phase] = []
        self._note("python")

    def run(self, name: str, phase: Callable[[], Any]) -> Any:
        """Return ``phase()``, when the device has done its work."""
        result = phase()
        self._note(name)
        return result

    def _note(self, name: str) -> None:
        torch: Any = sys.modules.get("torch")
        peak = 0.0
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        status = Path("/proc/self/status").read_text()
        host = int(status.partition("VmHWM:")[2].split()[0]) / 2**20
        phase = Phase(name=name, seconds=now - self._last, host=host, device=peak)
        self.phases.append(phase)
        self._last = time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_start() -> float:
    """Return when this process began, in seconds of ``CLOCK_BOOTTIME``."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _bmt(options: argparse.Namespace) -> list[Phase]:
    clock = _Clock()
    clock.run("import torch", _import_torch)
    clock.run("first optimizer of torch", _first_optimizer)
    bmt: Any = clock.run("import the toolkit", _import_bmt)
    clock.run("start the run", lambda: bmt.init_distributed(device=options.device))
    try:
        from bench.case import DTYPES
        from bench.models import GPT, SIZES

        units = clock.run(
            "build on meta", lambda: list(SIZES[options.size].units(DTYPES[options.dtype]))
        )

        def shard() -> Any:
            first, *layers, last = [bmt.Block(unit) for unit in units]
            return GPT(first, bmt.TransformerBlockList(layers), last)

        model = clock.run("shard", shard)
        clock.run("first values", lambda: bmt.init_parameters(model))
        optimizer = clock.run(
            "make the optimizer", lambda: bmt.optim.AdamOptimizer(model.parameters(), lr=1e-5)
        )
        return _first_step(
            options, clock, model, optimizer, bmt.rank(), next(model.parameters()).device
        )
    finally:
        bmt.shutdown()


def _fsdp2(options: argparse.Namespace) -> list[Phase]:
    clock = _Clock()
    torch = clock.run("import torch", _import_torch)
    clock.run("first optimizer of torch", _first_optimizer)
    fully_shard, policy_class = clock.run("import the toolkit", _import_fsdp2)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)

    def start() -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if kind == "cuda":
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        return init_device_mesh(kind, (torch.distributed.get_world_size(),))

    mesh = clock.run("start the run", start)
    try:
        from bench.case import DTYPES
        from bench.models import GPT, SIZES

        units = clock.run("build on meta", lambda: list(SIZES[options.size].units(torch.float32)))

        def shard() -> Any:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            policy = policy_class()
            if options.dtype == "bf16":
                dtype = DTYPES["bf16"]
                policy = policy_class(param_dtype=dtype, reduce_dtype=dtype)
            first, *layers, last = units
            layers = [checkpoint_wrapper(layer) for layer in layers]
            for unit in (first, *layers, last):
                fully_shard(unit, mesh=mesh, mp_policy=policy)
            model = GPT(first, torch.nn.Sequential(*layers), last)
            return fully_shard(model, mesh=mesh, mp_policy=policy)

        model = clock.run("shard", shard)

        def first_values() -> None:
            model.to_empty(device=device)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()

        clock.run("first values", first_values)
        optimizer = clock.run(
            "make the optimizer",
            lambda: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
        )
        rank = torch.distributed.get_rank()
        return _first_step(options, clock, model, optimizer, rank, device)
    finally:
        torch.distributed.destroy_process_group()


def _import_torch() -> Any:
    import torch

    return torch


def _first_optimizer() -> None:
    """Make an optimizer of torch, for which torch imports its compiler, tensors and FSDP. Every
    training does, early or late; as a phase of its own, it is in no other.
    """
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def _import_bmt() -> Any:
    import bmtrain as bmt

    # Names are imported when they are first used.
    _ = bmt.Block, bmt.optim.AdamOptimizer, bmt.init_distributed
    return bmt


def _import_fsdp2() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return fully_shard, MixedPrecisionPolicy


def _first_step(
    options: argparse.Namespace, clock: _Clock, model: Any, optimizer: Any, rank: int, device: Any
) -> list[Phase]:
    """Train two steps, and return the phases with the largest figures of all ranks. Collective."""

    def batch() -> Any:
        from bench.models import SIZES
        from bench.training import make_batch

        return make_batch(SIZES[options.size], batch=options.batch, rank=rank, device=device)

    tokens, targets = clock.run("make a batch", batch)
    import torch

    from bench.training import token_loss

    for number in ("first", "second"):
        loss = clock.run(f"{number} forward", lambda: token_loss(model(tokens), targets))
        clock.run(f"{number} backward", loss.backward)
        clock.run(f"{number} optimizer step", optimizer.step)
        optimizer.zero_grad()
    figures = torch.tensor(
        [[p.seconds, p.host, p.device] for p in clock.phases], dtype=torch.float64, device=device
    )
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
    return [
        Phase(name=phase.name, seconds=seconds, host=host, device=memory)
        for phase, (seconds, host, memory) in zip(clock.phases, figures.tolist(), strict=True)
    ]


def _table(options: argparse.Namespace, phases: Sequence[Phase]) -> str:
    started = [phase for phase in phases if not phase.name.startswith("second")]
    total = sum(phase.seconds for phase in started)
    lines = [
        f"{options.toolkit}, {options.size}, {options.dtype}: {total:.2f} s to the end of the first"
        " step",
        "| phase | seconds | share | host, GiB | device, GiB |",
        "|---|---|---|---|---|",
    ]
    for phase in phases:
        share = f"{phase.seconds / total:.0%}" if phase in started else ""
        mark = " *" if phase in started and phase.seconds > _MOST * total else ""
        lines.append(
            f"| {phase.name}{mark} | {phase.seconds:.3f} | {share} | {phase.host:.2f} |"
            f" {phase.device:.2f} |"
        )
    return "\n".join(lines)
