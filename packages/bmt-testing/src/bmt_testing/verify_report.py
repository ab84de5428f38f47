"""What ``bmt verify`` tells at its end: tables for people, and a file for programs.

The file is JSON, because the tables are printed anyway: a job that runs every night keeps the
file, and a script compares what was drawn, or takes the settings of a failure from it.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bmt_core.cli.output import make_table, styled
from bmt_testing.matches_single import ComparedTraining
from bmt_testing.settings import TrainingSettings
from bmt_testing.verification import Verification

_KINDS = {
    "loss": "losses",
    "gradient": "gradients",
    "norm": "norms",
    "buffer": "buffers",
    "result": "results of the loop",
}

_DRAWN: dict[str, Callable[[TrainingSettings], Iterable[Any]]] = {
    "ranks": lambda drawn: [drawn.ranks],
    "further axes": lambda drawn: [f"{axis}={size}" for axis, size in drawn.axes.items()] or ["no"],
    "shard_size": lambda drawn: [str(drawn.shard_size or "all")],
    "optimizer_shards": lambda drawn: [str(drawn.optimizer_shards or "as shard_size")],
    "dtype": lambda drawn: [drawn.dtype],
    "param_dtype": lambda drawn: [str(drawn.param_dtype or "dtype")],
    "ZeRO levels of Blocks": lambda drawn: set(drawn.levels),
    "recomputed Blocks": lambda drawn: [_how_many(drawn.recompute)],
    "frozen parameters": lambda drawn: ["some" if any(drawn.frozen) else "none"],
    "micro-batches": lambda drawn: [drawn.micro_batches],
    "no_sync": lambda drawn: [_yes(drawn.no_sync)],
    "gradients of ranks": lambda drawn: [drawn.gradients],
    "clipped": lambda drawn: [_yes(drawn.max_norm is not None)],
    "optimizer": lambda drawn: [drawn.optimizer],
    "saved and loaded": lambda drawn: [_yes(drawn.reload)],
    "prefetch_bytes": lambda drawn: [
        "default" if drawn.prefetch_bytes is None else f"{drawn.prefetch_bytes:g}"
    ],
    "reduce_dtype": lambda drawn: [drawn.reduce_dtype],
}


_OF_A_LOOP = {
    *("frozen parameters", "micro-batches", "no_sync", "gradients of ranks", "clipped"),
    *("optimizer", "saved and loaded", "param_dtype"),
}
"""What a loop of the user's own decides."""


def drawn_values(result: Verification, *, has_loop: bool) -> dict[str, dict[str, int]]:
    """Return in how many examples each value of each setting was drawn."""
    return {
        name: {
            str(value): count
            for value, count in sorted(
                Counter(
                    value for example in result.examples for value in values(example.settings)
                ).items()
            )
        }
        for name, values in _DRAWN.items()
        if not (has_loop and name in _OF_A_LOOP)
    }


def print_result(
    console: Console, model: str, training: ComparedTraining, result: Verification
) -> None:
    """Print what was drawn and compared, and what differs."""
    number, seconds = len(result.examples), f"{result.seconds:.1f} s"
    drawn = make_table(f"Drawn: {number} trainings without a difference", "setting", "examples")
    for name, values in drawn_values(result, has_loop=training.train is not None).items():
        cells = ", ".join(f"{value}: {count}" for value, count in values.items())
        drawn.add_row(styled(name), styled(cells))
    compared = make_table("Compared on all ranks", "kind", "numbers")
    for kind, count in _compared(result).items():
        compared.add_row(styled(kind), styled(f"{count:,}"))
    if result.examples:
        console.print(drawn)
        console.print(compared)
    if result.failure is None:
        equal = f"{model}: {number} trainings equal {training.compared_with}. {seconds}."
        console.print(styled(equal, "green"), soft_wrap=True)
        return
    console.print(styled(result.failure.message), soft_wrap=True)
    console.print()
    console.print(
        styled(
            f"{model}: example {result.needed} differs, and this is the simplest of"
            f" {result.simpler} further ones. {seconds}.",
            "bold red",
        )
    )


def write_report(
    path: Path,
    model: str,
    training: ComparedTraining,
    options: Mapping[str, Any],
    result: Verification,
) -> None:
    """Write all that was drawn and found to ``path``, as JSON."""
    failure = result.failure
    content = {
        "model": model,
        "result": "matches" if failure is None else "differs",
        "compared_with": training.compared_with,
        "options": dict(options),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.version.__version__,
            "bmt-testing": version("bmt-testing"),
        },
        "seconds": round(result.seconds, 3),
        "drawn": drawn_values(result, has_loop=training.train is not None),
        "compared": _compared(result),
        "failure": None
        if failure is None
        else {
            "settings": repr(failure.settings),
            "message": failure.message,
            "example": result.needed,
            "simpler_tried": result.simpler,
        },
        "examples": [
            {
                "settings": repr(example.settings),
                "numbers": example.compared.total(),
                "seconds": round(example.seconds, 3),
            }
            for example in result.examples
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _compared(result: Verification) -> dict[str, int]:
    total: Counter[str] = sum((example.compared for example in result.examples), Counter())
    return {_KINDS.get(kind, "parameters"): count for kind, count in sorted(total.items())}


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _how_many(flags: tuple[bool, ...]) -> str:
    return "all" if all(flags) else "some" if any(flags) else "none"
