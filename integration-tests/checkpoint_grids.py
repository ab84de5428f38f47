"""Save the state of a training on each grid of ranks, and load it on each other one.

All pairs of grids up to --ranks ranks, and --pairs drawn pairs of grids of --large ranks. What is
loaded must be what was saved to the last bit, and the steps that follow those of an uninterrupted
run on the grid that loads.

python3 tools/dev.py setup && .venv/bin/python integration-tests/checkpoint_grids.py --seeds 0:2
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from grid_trainings import Grid, Record, all_grids, differences, load_on, save_on


def main() -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", default="0", help="of the settings: first and end, such as 0:4; or one"
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="all pairs of grids up to this number of ranks"
    )
    parser.add_argument(
        "--large", type=int, default=8, help="ranks of the grids of which pairs are drawn"
    )
    parser.add_argument("--pairs", type=int, default=40, help="number of pairs drawn")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    failures = 0
    for seed in range(int(first), int(end or int(first) + 1)):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        grids = all_grids(range(1, options.ranks + 1), 5, seed)
        failures += compare(grids, [(a, b) for a in grids for b in grids], dtype, seed)
        draw, large = random.Random(seed), all_grids([options.large], 8, seed)
        drawn = [(draw.choice(large), draw.choice(large)) for _ in range(options.pairs)]
        failures += compare(large, drawn, dtype, seed)
    print(f"{failures} pairs differ")
    return 1 if failures else 0


def compare(
    grids: Sequence[Grid], pairs: Sequence[tuple[Grid, Grid]], dtype: torch.dtype, seed: int
) -> int:
    """Save on the first and load on the second grid of each pair; return the number of pairs
    that differ.
    """
    failures, done, start = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        folders = {grid: Path(root) / str(number) for number, grid in enumerate(grids)}
        saved: dict[Grid, Record] = {
            grid: save_on(grid, folder, dtype)
            for grid, folder in folders.items()
            if any(grid in p for p in pairs)
        }
        for loading in saved:
            sources = [a for a, b in pairs if b == loading]
            records = load_on(loading, [folders[source] for source in sources], dtype)
            for source, record in zip(sources, records, strict=True):
                found = differences(record, saved[source], saved[loading], dtype)
                failures += bool(found)
                done += 1
                if found:
                    print(
                        f"{source} -> {loading}: {len(found)} differences",
                        *found[:5],
                        sep="\n  ",
                        flush=True,
                    )
            print(f"{done} pairs loaded, {failures} differ", flush=True)
    seconds = time.monotonic() - start
    print(
        f"seed {seed}, {dtype}: {len(pairs)} pairs of {len(saved)} grids, {failures} differ,"
        f" {seconds:.0f} s",
        flush=True,
    )
    return failures


if __name__ == "__main__":
    sys.exit(main())
