"""Compare trainings drawn at random with plain torch in one process, for as many seeds as there is
time for.

python3 tools/dev.py setup && .venv/bin/python integration-tests/fuzz.py --seeds 100:200
--ranks 1,2,4
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "packages" / "bmt-zero" / "tests"))

from random_differences import differences
from random_plans import draw


def main() -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", default="0:100", help="first and end, such as 0:100; or one seed"
    )
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda: where the ranks compute")
    parser.add_argument(
        "--tp", type=int, help="tp_size of every training; without: drawn, mostly 1"
    )
    parser.add_argument(
        "--pp", type=int, help="pipe_size of every training; without: drawn, mostly 1"
    )
    parser.add_argument(
        "--shard-size", type=int, help="shard_size of every training; without: drawn, mostly none"
    )
    parser.add_argument(
        "--optimizer", help="only trainings that have it, such as offload; without: all"
    )
    parser.add_argument(
        "--float8", action="store_true", help="only trainings in float8; without: all"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no training after so long"
    )
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    last_begin = time.monotonic() + options.seconds
    may_round = options.device == "cpu" and find_spec("torchao") is not None
    trainings = failures = 0
    sizes = [int(size) for size in options.ranks.split(",")]
    for seed, world_size in (
        (s, size) for s in range(int(first), int(end or int(first) + 1)) for size in sizes
    ):
        if time.monotonic() > last_begin:
            break
        plan = draw(
            seed, options.tp, options.pp, shard_size=options.shard_size, may_round=may_round
        )
        if options.optimizer not in (None, plan.optimizer):
            continue
        if options.float8 and plan.float8 is None:
            continue
        trainings += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                messages = differences(plan, world_size, folder, options.device)
            except Exception as error:
                # Of the comparison's own process or of a rank: the next seed may do better.
                messages = [str(error)]
        if messages:
            failures += 1
            print(
                f"seed {seed} on {world_size} ranks: {len(messages)} differences",
                *messages[:5],
                sep="\n  ",
                flush=True,
            )
    print(f"{failures} of {trainings} trainings differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
