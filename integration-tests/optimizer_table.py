"""Train a small model by every optimizer that is installed, on several ranks and in plain torch,
and print what came of it.

The classes are those of torch.optim, pytorch_optimizer, prodigyopt, schedulefree, lion_pytorch,
torchao, bitsandbytes and transformers; what is not installed is left out. docs/optimizers.md says
how its table was made.

Put pytorch_optimizer, prodigyopt, schedulefree, lion_pytorch, torchao and bitsandbytes into a
directory of their own, without their dependencies, and run
``PYTHONPATH=DIRECTORY .venv/bin/python integration-tests/optimizer_table.py --ranks 1,2``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from optimizer_trainings import Training, outcome_of

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
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
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


def on_ranks(
    kind: str, options: dict[str, Any], world_size: int, dtype: str, level: int, tp: int
) -> Training:
    """Return what came of one optimizer; the worst of all ranks."""
    init = {"gradients": "mean", **({"tp_size": tp} if tp > 1 else {})}
    outcomes = rank_pool(world_size).outcomes(
        outcome_of,
        kind,
        options,
        DTYPES[dtype],
        level,
        init=init,
        timeout=120,
        grace=5,
        env={"OMP_NUM_THREADS": "1"},
    )
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        return Training(
            result="raises", detail=f"{failed[0].error_type}: {failed[0].error_message}"
        )
    first: Training = outcomes[0].value
    return first


def main() -> int:
    """Print the table and return 1 if an optimizer trains another model without a word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--level", type=int, default=3, help="ZeRO level")
    parser.add_argument(
        "--tp", type=int, default=1, help="tp_size, where the number of ranks is a multiple of it"
    )
    parser.add_argument("--only", default="", help="only classes whose names have this in them")
    arguments = parser.parse_args()
    ranks = [int(number) for number in arguments.ranks.split(",")]
    versions = []
    for distribution in PACKAGES.values():
        try:
            versions.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(f"{', '.join(versions)}; {arguments.dtype}, level {arguments.level}, tp {arguments.tp}\n")
    columns = " | ".join(f"{number} ranks" if number > 1 else "1 rank" for number in ranks)
    print(f"| optimizer | needs | {columns} | found in ms | |\n|{'---|' * (len(ranks) + 4)}")
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for kind, options in classes():
        if arguments.only.lower() not in kind.lower():
            continue
        found = [
            on_ranks(kind, options, number, arguments.dtype, arguments.level, arguments.tp)
            for number in ranks
        ]
        kinds[found[-1].needs or "not known"] += 1
        worst = next(
            (
                r
                for r in ("wrong", "raises", "warned", "refused", "fails")
                if any(f.result == r for f in found)
            ),
            "right",
        )
        counts[worst] += 1
        results = " | ".join(
            each.result.upper() if each.result == "wrong" else each.result for each in found
        )
        detail = " ".join(found[-1].detail.split()).replace("|", "/")[:160]
        print(
            f"| {kind.replace(':', '.')} | {found[-1].needs} | {results} |"
            f" {found[-1].milliseconds:.0f} | {detail} |",
            flush=True,
        )
    print(f"\n{dict(kinds)}\n{dict(counts)}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
