"""Save and load a parameter of more than 2 GiB, and one behind it at more than 4 GiB, in each
format on two ranks; compare bits.

Takes about 15 GiB of memory and of disk.

python3 tools/dev.py setup && .venv/bin/python integration-tests/checkpoint_large.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import bmt_core
from bmt_checkpoint import load, save
from bmt_core.run.runtime import current
from bmt_params import DistributedParameter
from bmt_testing import run_ranks

FORMATS = ("model.pt", "model.safetensors", "model/", "model.dcp")


def main() -> int:
    """Try each format, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=2.5, help="of the large parameter, in bfloat16"
    )
    parser.add_argument(
        "--formats", default=",".join(FORMATS), help=f"default: {','.join(FORMATS)}"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a disk with room"
    )
    options = parser.parse_args()
    failures = 0
    for name in options.formats.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows = int(options.gib * 2**30 / 2 / COLUMNS)
            found = run_ranks(saved_and_loaded, 2, f"{folder}/{name}", rows, timeout=1200)
        failures += any(differing for *_, differing in found)
        saving, loading, differing = (max(figures) for figures in zip(*found, strict=True))
        print(
            f"{name}: saved in {saving:.1f} s, loaded in {loading:.1f} s, {differing}"
            " elements differ",
            flush=True,
        )
    print("wrong" if failures else "right")
    return 1 if failures else 0


COLUMNS = 1 << 14


class Model(nn.Module):
    """Two large parameters, so that the second one ends far behind the first, and a small one."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        self.large = made(rows, seed)
        self.second = made(rows, seed + 1)
        self.last = made(3, seed + 2)


def made(rows: int, seed: int) -> DistributedParameter:
    """Return a parameter of ``rows`` rows, with the values of :func:`pieces_with_values`."""
    parameter = DistributedParameter(
        torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device="meta")
    )
    with torch.no_grad():
        for piece, values in pieces_with_values(parameter, seed):
            piece.copy_(values)
        parameter.mul_(1)  # a write to the parameter itself says that it has values
    return parameter


def pieces_with_values(
    parameter: torch.Tensor, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of this rank's part, and what should be in them: bits that depend on rank
    and place.
    """
    for start in range(0, parameter.numel(), 1 << 24):
        piece = parameter.detach()[start : start + (1 << 24)].view(torch.int16)
        places = torch.arange(start, start + piece.numel(), dtype=torch.int32).add_(
            current().rank + 2 * seed
        )
        yield (
            piece,
            places.mul_(2654435).bitwise_right_shift_(16).bitwise_and_(0x3FFF).to(torch.int16),
        )


def saved_and_loaded(path: str, rows: int) -> tuple[float, float, int]:
    """Return the seconds of saving and of loading, and how many elements of this rank's parts are
    not those that were saved.
    """
    model = Model(rows, seed=1)
    start = time.monotonic()
    save(model, path)
    saved = time.monotonic()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bmt_core.synchronize()
    began = time.monotonic()
    load(model, path)
    loaded = time.monotonic()
    differing = 0
    for number, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DistributedParameter)
        for piece, values in pieces_with_values(parameter, 1 + number):
            differing += int((piece != values).sum())
    bmt_core.synchronize()
    if current().rank == 0 and Path(path).is_dir():
        shutil.rmtree(path)
    return saved - start, loaded - began, differing


if __name__ == "__main__":
    sys.exit(main())
