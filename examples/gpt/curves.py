#!/usr/bin/env python3
"""Draw the losses of several runs of ``train.py`` in one picture:
``python curves.py runs/adamw runs/muon --out losses.svg``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from report import whole_records

COLOURS = ("#4c78a8", "#d62728", "#54a24b", "#9467bd")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="directories that train.py wrote (its --out)"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the picture, .svg or .png")
    options = parser.parse_args(arguments)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(options.runs):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*points(run, "loss"), color=colour, alpha=0.4, label=f"{run.name}, training")
        held_out = points(run, "held_out_loss")
        axes.plot(*held_out, "o-", color=colour, label=f"{run.name}, held out")
        print(f"{run}: held-out loss {held_out[1][0]:.3f} -> {held_out[1][-1]:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    # The same runs give the same file, with letters as text.
    with rc_context({"svg.hashsalt": "bmt", "svg.fonttype": "none"}):
        metadata = {"Date": None} if options.out.suffix == ".svg" else None
        figure.savefig(options.out, dpi=120, metadata=metadata)


def points(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of the records of ``run`` that have ``name``."""
    records = [
        record for record in whole_records(run / "metrics.jsonl") if record.get(name) is not None
    ]
    if not records:
        raise ValueError(f"{run / 'metrics.jsonl'} has no {name}: train.py has not begun there.")
    return [record["step"] for record in records], [record[name] for record in records]


if __name__ == "__main__":
    main()
