"""``state``: saving and loading a model beside ``torch.save`` and DCP on the same disk, in one run;
start it with torchrun.

torch.save and torch.load: rank 0 alone, of the plain model. DCP: ``torch.distributed.checkpoint``
of the same model under FSDP2. bmt: a directory, of the same model in Blocks. All three have their
files on the disk when a save ends; torch.save is given an ``fsync`` for it. Every save makes new
files, as those of a training do; what the case saved before is deleted first, which does not count.
Figures are the seconds of the slowest rank, medians over rounds. One of the three models is in
memory at a time, and its cases take turns. Python's garbage is collected before each case.

The pause is what ``bmt.save(non_blocking=True)`` takes until it returns. The copy is what it would
take at least: each rank copies the same parts of the same tensors, all ranks at the same time. The
first round copies to memory that was never used, as the first save does, and the later rounds to
the same memory again, as later saves do; so the first is apart from the median of the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bmt_core
from bmt_checkpoint import load, save, wait_for_saves
from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current
from bmt_zero import Block

_BMT, _DCP, _TORCH = "bmt save", "DCP save", "torch.save"
_PAUSE, _COPY = "pause of bmt save(non_blocking=True)", "copy of its snapshot"
_SAVED = {_BMT: "bmt", _PAUSE: "beside", _DCP: "dcp", _TORCH: "plain.pt"}
"""Under which name each of these cases saves."""
Case = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one case, round by round, on the slowest rank; and the bytes of the model."""

    case: str
    bytes: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median over rounds; of the pause and the copy, over those after the first."""
        later = self.seconds[1:] if self.case in (_PAUSE, _COPY) else []
        return statistics.median(later or self.seconds)


def main(arguments: Sequence[str]) -> int:
    """Measure and print one table, on rank 0."""
    options = _parser().parse_args(arguments)
    bmt_core.init_distributed(device="cpu")
    try:
        bench = _Bench(options.folder, options.layers, options.width, options.rounds)
        differing = bench.measure_blocks()
        bench.measure_fsdp()
        bench.measure_plain()
        if current().rank == 0:
            rows = list(bench.rows.values())
            print(_table(bench.rows), f"{differing} tensors differ", sep="\n", flush=True)
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
    parser.add_argument(
        "--layers", type=int, default=40, help="of 12 width**2 parameters each (default: 40)"
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="default: 1024: with 40 layers 2.0 GB in float32"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each case, taking turns (default: 3)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs"),
        help="on the disk to be measured (default: runs)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures here, one JSON object a line"
    )
    return parser


class _Bench:
    """What is measured of the model in its three forms."""

    def __init__(self, folder: Path, layers: int, width: int, rounds: int) -> None:
        self._folder = folder / "bench-state"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._layers = partial(_layers, layers, width)
        self._rounds = rounds
        self._bytes = 4 * sum(p.numel() for p in next(_layers(1, width)).parameters()) * layers
        self._copies: list[torch.Tensor] = []
        # The host of a virtual machine, too, hands out memory when it is first touched. That
        # belongs to no case.
        torch.ones(3 * self._bytes // current().world.size, dtype=torch.uint8)
        self.rows: dict[str, Row] = {}

    def measure_blocks(self) -> int:
        """Return how many tensors of the model that bmt has loaded are wrong. Collective, as the
        others are.
        """
        model = nn.ModuleList(Block(layer) for layer in self._layers())
        target = f"{self._saved(_BMT)}/"
        for _ in range(self._rounds):
            self._measure(_BMT, lambda: save(model, target))
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            self._measure("bmt load", lambda: load(model, target))
            self._measure(_PAUSE, lambda: save(model, f"{self._saved(_PAUSE)}/", True))
            self._measure(_COPY, lambda: self._copy(list(model.parameters())))
        differing = 0
        for layer, block in zip(self._layers(), model, strict=True):
            loaded = block.state_dict()
            differing += sum(
                not torch.equal(loaded[name], value) for name, value in layer.state_dict().items()
            )
        self._copies.clear()
        return differing

    def measure_fsdp(self) -> None:
        model, mesh, folder = (
            nn.ModuleList(),
            init_device_mesh("cpu", (current().world.size,)),
            self._saved(_DCP),
        )
        for layer in self._layers():
            fully_shard(layer, mesh=mesh)
            model.append(layer)

        def load_state() -> None:
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state)

        for _ in range(self._rounds):
            self._measure(_DCP, lambda: dcp.save(model.state_dict(), checkpoint_id=folder))
            self._measure("DCP load", load_state)

    def measure_plain(self) -> None:
        model, path = (
            nn.ModuleList(self._layers() if current().rank == 0 else ()),
            self._saved(_TORCH),
        )

        def save_file() -> None:
            if current().rank == 0:
                with path.open("wb") as file:
                    torch.save(model.state_dict(), file)
                    file.flush()
                    os.fsync(file.fileno())

        def load_file() -> None:
            if current().rank == 0:
                model.load_state_dict(torch.load(path, weights_only=True))

        for _ in range(self._rounds):
            self._measure(_TORCH, save_file)
            self._measure("torch.load", load_file)

    def _copy(self, parameters: list[nn.Parameter]) -> None:
        """Copy this rank's parts of ``parameters``."""
        if not self._copies:
            self._copies = [torch.empty(p.numel()) for p in parameters]
        for copy, p in zip(self._copies, parameters, strict=True):
            copy.copy_(p.detach())

    def _measure(self, name: str, case: Case) -> None:
        """Add the seconds of ``case`` on the slowest rank. What goes on beside it is not counted,
        but waited for. Collective.
        """
        gc.collect()
        if name in _SAVED and current().rank == 0:
            saved = self._saved(name)
            saved.unlink() if saved.is_file() else shutil.rmtree(saved, ignore_errors=True)
            os.sync()
        bmt_core.synchronize()
        start = time.monotonic()
        case()
        seconds = time.monotonic() - start
        wait_for_saves()
        row = self.rows.setdefault(name, Row(case=name, bytes=self._bytes, seconds=[]))
        row.seconds.append(max(all_gather_object(seconds, current().world)))

    def _saved(self, case: str) -> Path:
        return self._folder / _SAVED[case]


def _layers(count: int, width: int) -> Iterator[nn.Module]:
    """Yield matrices of the shapes of transformer layers, one layer after the other, with the same
    values on every rank.

    They count up from the number of the tensor, which takes less time than to draw them.
    """
    sizes, number = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)), 0
    for _ in range(count):
        layer = nn.Sequential(*(nn.Linear(*size, device="meta") for size in sizes)).to_empty(
            device="cpu"
        )
        for p in layer.parameters():
            torch.arange(number, number + p.numel(), out=p.detach().view(-1))
            number += 1
        yield layer


def _table(rows: Mapping[str, Row]) -> str:
    median = {name: row.median for name, row in rows.items()}
    width = max(map(len, median))
    pause, copy = rows[_PAUSE], rows[_COPY]
    return "\n".join(
        [
            (
                f"{pause.bytes / 1e9:.2f} GB on {current().world.size} ranks, seconds: median"
                " (all rounds)"
            ),
            *(
                (
                    f"{row.case:{width}} {row.median:8.3f}"
                    f" ({', '.join(f'{s:.3f}' for s in row.seconds)})"
                )
                for row in rows.values()
            ),
            (
                f"bmt to DCP: save {median[_DCP] / median[_BMT]:.2f}, load"
                f" {median['DCP load'] / median['bmt load']:.2f}"
            ),
            (
                f"pause to copy: {median[_PAUSE] / median[_COPY]:.2f}, of the first save"
                f" {pause.seconds[0] / copy.seconds[0]:.2f}"
            ),
        ]
    )
