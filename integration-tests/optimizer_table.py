"""Train a small model by every optimizer that is installed, on several ranks and in plain torch,
and print what came of it.

The classes are those of torch.optim, pytorch_optimizer, prodigyopt, schedulefree, lion_pytorch,
torchao, bitsandbytes and transformers; what is not installed is left out. Each is trained as it is
given to an ``OptimManager``, on all ``GRIDS``; one that needs whole tensors, or all of them, also
as ``bmt.optim.whole`` makes it, on two ranks. optimizer_table.csv has what each was found to be;
``--csv`` writes it.

Put pytorch_optimizer, prodigyopt, schedulefree, lion_pytorch, torchao and bitsandbytes into a
directory of their own, without their dependencies, and run
``PYTHONPATH=DIRECTORY .venv/bin/python integration-tests/optimizer_table.py``.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optimizer_trainings import Case, Expected, Recipe, Training, expected_of, outcomes_of

from bmt_testing.pool import rank_pool

PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "lion_pytorch": "lion_pytorch",
    "torchao.optim": "torchao",
    "bitsandbytes.optim": "bitsandbytes",
    "transformers": "transformers",
}
SGD = ("torch.optim", "SGD")
_SHARP = ("SAM", "WSAM", "GSAM", "LookSAM", "FriendlySAM")
_WRAPPERS = ("Lookahead", "OrthoGrad", "TRAC", "PCGrad", "ScheduleFreeWrapper")
_MUONS = ("AdaGO", "AdaMuon", "DistributedMuon", "MuonClip", "NorMuon")
_OF_MODELS = ("AdamMini", "LOMO", "AdaLOMO")
_WITH_RATE = ("LARS", "SGD", "LARS32bit", "LARS8bit", "SGD32bit", "SGD8bit")
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"base_optimizer": SGD, "lr": 0.01} for name in _SHARP},
    **{name: {"inner": True} for name in _WRAPPERS},
    **{name: {"matrices": "use_muon"} for name in _MUONS},
    **{name: {"model": True, "lr": 0.001} for name in _OF_MODELS},
    **{name: {"lr": 0.01, "momentum": 0.9} for name in _WITH_RATE},
    "LBFGS": {"lr": 0.05, "max_iter": 3},
    "BSAM": {"num_data": 32},
    "Kron": {"max_size_triangular": 64},
    "torch.optim:Muon": {"matrices only": True},
    "SpectralSphere": {"matrices only": True},
    "Ranger21": {"num_iterations": 12},
}


def classes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the optimizers of all packages, as module:class, with options for
    their constructors.
    """
    for module in PACKAGES:
        try:
            found = importlib.import_module(module)
            names = sorted(dir(found)) if module != "transformers" else ["Adafactor"]
            members = [(name, getattr(found, name)) for name in names]
        except Exception as error:
            print(f"{module}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for name, cls in members:
            is_abstract = (
                name.startswith("_")
                or name in ("Optimizer", "BaseOptimizer")
                or inspect.isabstract(cls)
            )
            if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and not is_abstract:
                muon = (
                    {"matrices": "use_muon"}
                    if (module, name) == ("pytorch_optimizer", "Muon")
                    else {}
                )
                yield (
                    f"{module}:{name}",
                    muon or OPTIONS.get(f"{module}:{name}", OPTIONS.get(name, {})),
                )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A number of ranks, ``tp_size``, and the trainings on them."""

    ranks: int
    tp: int = 1
    cases: Sequence[Case]


FLOAT64, BF16 = torch.float64, torch.bfloat16
GRIDS = [
    Grid(ranks=1, cases=[Case(), Case(dtype=BF16)]),
    Grid(ranks=2, cases=[Case(), Case(dtype=BF16), Case(level=0)]),
    Grid(ranks=4, cases=[Case()]),
    Grid(ranks=2, tp=2, cases=[Case(), Case(dtype=FLOAT64)]),
]
CSV = Path(__file__).with_suffix(".csv")
FOUND = {
    "elements": "elementwise",
    "tensors": "needs whole tensors",
    "all tensors": "needs all tensors",
    "unknown": "not known",
    "": "refuses parts in its constructor",
}
WORST = ("wrong", "raises", "warned", "refused", "fails", "random", "rounding", "right")


def on_ranks(
    kind: str,
    options: dict[str, Any],
    grid: Grid,
    expected: Mapping[tuple[torch.dtype, bool], Expected],
) -> list[Training]:
    """Return what came of the cases of ``grid``. Of each it is what rank 0 says, which alone is
    warned, unless it is worse on another.
    """
    init = {"gradients": "mean", **({"tp_size": grid.tp} if grid.tp > 1 else {})}
    outcomes = rank_pool(grid.ranks).outcomes(
        outcomes_of,
        kind,
        options,
        grid.cases,
        expected,
        init=init,
        timeout=60,
        grace=5,
        env={"OMP_NUM_THREADS": "1"},
    )
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        detail = f"{failed[0].error_type}: {failed[0].error_message}"
        return [Training(result="raises", detail=detail)] * len(grid.cases)
    return [
        of_ranks[0]
        if of_ranks[0].result == "warned"
        else min(of_ranks, key=lambda each: WORST.index(each.result))
        for of_ranks in zip(*[outcome.value for outcome in outcomes], strict=True)
    ]


def expected_values(
    kind: str,
    options: dict[str, Any],
    dtypes: Collection[torch.dtype] = (torch.float32, FLOAT64, BF16),
) -> dict[tuple[torch.dtype, bool], Expected]:
    """Train in plain torch, in those of float32, float64, bfloat16, and bfloat16 with masters that
    ``dtypes`` has; what fails in other types than float32 is left out.
    """
    recipe = Recipe(kind, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {}
        if torch.float32 in dtypes:
            expected[torch.float32, False] = expected_of(recipe, torch.float32)
        for dtype, masters in ((FLOAT64, False), (BF16, False), (BF16, True)):
            if dtype not in dtypes:
                continue
            try:
                expected[dtype, masters] = expected_of(recipe, dtype, masters=masters)
            except Exception:
                continue
    return expected


def row_of(kind: str, options: dict[str, Any]) -> tuple[str, str, list[Training]]:
    """Return what the optimizer needs, the time in ms in which that was found out, and all
    trainings.
    """
    try:
        expected = expected_values(kind, options)
    except Exception as error:
        return "", "", [Training(result="fails", detail=f"{type(error).__name__}: {error}")]
    found = [each for grid in GRIDS for each in on_ranks(kind, options, grid, expected)]
    needs = next((each.needs for each in found if each.needs), "")
    if needs.partition(",")[0] in ("tensors", "all tensors", ""):  # "": it cannot be made of parts
        way = "together" if needs.startswith("all tensors") else "whole"
        by_whole = Grid(ranks=2, cases=[Case(way=way), Case(way=way, dtype=BF16)])
        found += on_ranks(kind, options, by_whole, expected)
    return needs, f"{max(each.milliseconds for each in found):.0f}", found


def main() -> int:
    """Print the table and return 1 if an optimizer trains another model without a word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only classes whose names begin so, by commas")
    parser.add_argument("--after", default="", help="only classes after this one")
    parser.add_argument("--csv", type=Path, help="also write what each class was found to be")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = []
    for distribution in PACKAGES.values():
        try:
            versions.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(f"{', '.join(versions)}\n")
    columns = [
        f"{grid.ranks}{f' (tp {grid.tp})' if grid.tp > 1 else ''} {_text(case)}"
        for grid in GRIDS
        for case in grid.cases
    ] + ["2 whole float32", "2 whole bfloat16"]
    print(f"| optimizer | needs | ms | {' | '.join(columns)} | |\n|{'---|' * (len(columns) + 4)}")
    counts: Counter[tuple[str, str]] = Counter()
    rows: list[tuple[str, str, str]] = []
    chosen = dict(classes())
    names = list(chosen)
    for kind in names[names.index(arguments.after) + 1 if arguments.after else 0 :]:
        if not kind.startswith(tuple(arguments.only.split(","))):
            continue
        options = chosen[kind]
        needs, milliseconds, found = row_of(kind, options)
        worst = min(found, key=lambda each: WORST.index(each.result))
        counts[needs, worst.result] += 1
        kind_of_needs, _, closure = needs.partition(",")
        found_to_be = FOUND[kind_of_needs] + (", and a closure" if closure else "")
        was_tried = needs or worst.result != "fails"
        module, _, name = kind.partition(":")
        rows.append((module, name, found_to_be if was_tried else "not tried"))
        detail = " ".join(worst.detail.split()).replace("|", "/")[:400]
        results = [each.result.upper() if each.result == "wrong" else each.result for each in found]
        print(
            f"| {kind.replace(':', '.')} | {needs} | {milliseconds} | {' | '.join(results)} |"
            f" {detail} |",
            flush=True,
        )
    print("\n" + "\n".join(f"{needs}, {worst}: {n}" for (needs, worst), n in counts.items()))
    if arguments.csv is not None:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("module", "class", "found"))
            rows.sort(key=lambda row: (row[0], row[1].lower()))
            writer.writerows(rows)
    return 1 if any(worst == "wrong" for _, worst in counts) else 0


def _text(case: Case) -> str:
    return f"{str(case.dtype).removeprefix('torch.')} level {case.level}"


if __name__ == "__main__":
    sys.exit(main())
