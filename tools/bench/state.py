"""``state``: saving and loading a model beside ``torch.save`` and DCP on the same disk, in one run; start it with torchrun.

torch.save and torch.load: rank 0 alone, of the plain model. DCP: ``torch.distributed.checkpoint`` of the same model under
FSDP2. bmt: a directory, of the same model in Blocks. All three have their files on the disk when a save ends; torch.save is given
an ``fsync`` for it. Every save makes new files, as those of a training do; what the case saved before is deleted first, which does
not count. Cases take turns; figures are the seconds of the slowest rank, medians over rounds. The pause is what
``bmt.save(non_blocking=True)`` takes until it returns; the copy, what a rank takes to copy the bytes of its snapshot in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bmt_core
from bmt_core.checkpoint import load, save, wait_for_saves
from bmt_core.comm.objects import all_gather_object
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current
from bmt_zero import Block

_TORCH, _DCP, _BMT, _PAUSE = "torch.save", "DCP save", "bmt save", "pause of bmt save(non_blocking=True)"
_SAVED = {_TORCH: "plain.pt", _DCP: "dcp", _BMT: "bmt", _PAUSE: "beside"}
"""Under which name each of these cases saves."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one case, round by round, on the slowest rank; and the bytes of the model."""

    case: str
    bytes: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median over rounds."""
        return statistics.median(self.seconds)


def main(arguments: Sequence[str]) -> int:
    """Measure and print one table, on rank 0."""
    options = _parser().parse_args(arguments)
    bmt_core.init_distributed(device="cpu")
    try:
        cases = _Cases(options.folder, options.layers, options.width)
        rows = [Row(case=name, bytes=cases.bytes, seconds=[]) for name in cases.all]
        for _ in range(options.rounds):
            for row in rows:
                cases.delete_saved_by(row.case)
                row.seconds.append(_timed(cases.all[row.case]))
        differing = cases.count_differences()
        if current().rank == 0:
            print(_table(rows), f"{differing} tensors differ", sep="\n", flush=True)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    finally:
        if current().rank == 0:
            shutil.rmtree(options.folder / "bench-state", ignore_errors=True)
        bmt_core.shutdown()
    return 1 if differing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench state", description=__doc__)
    parser.add_argument("--layers", type=int, default=40, help="of 12 width**2 parameters each (default: 40)")
    parser.add_argument("--width", type=int, default=1024, help="default: 1024: with 40 layers 2.0 GB in float32")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, taking turns (default: 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to be measured (default: runs)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures here, one JSON object a line")
    return parser


class _Cases:
    """The model in its three forms, and what is measured of each."""

    def __init__(self, folder: Path, layers: int, width: int) -> None:
        self._folder = folder / "bench-state"
        self._folder.mkdir(parents=True, exist_ok=True)
        mesh = init_device_mesh("cpu", (current().world.size,))
        self._plain = nn.ModuleList(_layers(layers, width)) if current().rank == 0 else None
        self._blocks = nn.ModuleList(Block(layer) for layer in _layers(layers, width))
        self._fsdp = nn.ModuleList()
        for layer in _layers(layers, width):
            fully_shard(layer, mesh=mesh)
            self._fsdp.append(layer)
        parameters = [p for p in self._blocks.parameters() if isinstance(p, DistributedParameter)]
        tensors = [p.whole_shape.numel() * p.element_size() for p in parameters]
        self.bytes = sum(tensors)
        self._snapshot = [torch.ones(size // 4 // current().world.size) for size in tensors]
        self.all: dict[str, Callable[[], object]] = {
            _TORCH: self._torch_save,
            "torch.load": self._torch_load,
            _DCP: lambda: dcp.save(self._fsdp.state_dict(), checkpoint_id=self._folder / _SAVED[_DCP]),
            "DCP load": self._dcp_load,
            _BMT: lambda: save(self._blocks, f"{self._folder / _SAVED[_BMT]}/"),
            "bmt load": lambda: load(self._blocks, f"{self._folder / _SAVED[_BMT]}/"),
            _PAUSE: lambda: save(self._blocks, f"{self._folder / _SAVED[_PAUSE]}/", True),
            "copy of its snapshot": lambda: [tensor.clone() for tensor in self._snapshot],
        }

    def delete_saved_by(self, case: str) -> None:
        """Delete what ``case`` has saved, if it saves. Collective."""
        if case in _SAVED and current().rank == 0:
            saved = self._folder / _SAVED[case]
            saved.unlink() if saved.is_file() else shutil.rmtree(saved, ignore_errors=True)
            os.sync()

    def count_differences(self) -> int:
        """Return how many tensors of the loaded model are not those that the plain model has, on rank 0. Collective."""
        loaded = nn.Module.state_dict(self._blocks)
        plain = {} if self._plain is None else self._plain.state_dict()
        return sum(not torch.equal(loaded[name], value) for name, value in plain.items())

    def _torch_save(self) -> None:
        if self._plain is not None:
            with (self._folder / _SAVED[_TORCH]).open("wb") as file:
                torch.save(self._plain.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())

    def _torch_load(self) -> None:
        if self._plain is not None:
            self._plain.load_state_dict(torch.load(self._folder / _SAVED[_TORCH], weights_only=True))

    def _dcp_load(self) -> None:
        state = self._fsdp.state_dict()
        dcp.load(state, checkpoint_id=self._folder / _SAVED[_DCP])
        self._fsdp.load_state_dict(state)


def _layers(count: int, width: int) -> Iterator[nn.Module]:
    """Yield matrices of the shapes of transformer layers, one layer after the other, with the same values on every rank."""
    torch.manual_seed(0)
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    for _ in range(count):
        yield nn.Sequential(*(nn.Linear(*size) for size in sizes))


def _timed(case: Callable[[], object]) -> float:
    """Return the seconds of ``case`` on the slowest rank. What goes on beside it is not counted, but waited for."""
    bmt_core.synchronize()
    start = time.monotonic()
    case()
    seconds = time.monotonic() - start
    wait_for_saves()
    slowest: float = max(all_gather_object(seconds, current().world))
    return slowest


def _table(rows: Sequence[Row]) -> str:
    median = {row.case: row.median for row in rows}
    width = max(map(len, median))
    lines = [f"{rows[0].bytes / 1e9:.2f} GB on {current().world.size} ranks, seconds: median (all rounds)"]
    lines += [f"{row.case:{width}} {row.median:8.3f} ({', '.join(f'{s:.3f}' for s in row.seconds)})" for row in rows]
    copy = rows[-1].case
    lines.append(
        f"bmt to DCP: save {median[_DCP] / median[_BMT]:.2f}, load {median['DCP load'] / median['bmt load']:.2f};"
        f" pause to copy: {median[_PAUSE] / median[copy]:.2f}"
    )
    return "\n".join(lines)
