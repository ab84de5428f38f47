"""Compare every schedule on every grid with plain torch in one process: pp 1, 2, 4 x tp 1, 2, with
the ranks that are left as dp.

python3 tools/dev.py setup && .venv/bin/python integration-tests/pipeline_grids.py --ranks 8

Each case trains another random model for 5 steps, with micro-batches fewer than, as many as, and
more than stages; what else happens in the steps is drawn as in ``fuzz.py``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "packages" / "bmt-zero" / "tests"))

from random_differences import differences
from random_plans import PipelinePlan, draw

# Of each way to run: the schedule of train_step (None: the list is called), chunks per stage, and
# their placement.
FORMS: dict[str, tuple[str | None, int, str]] = {
    "the list": (None, 1, "loop"),
    "the list, v": (None, 2, "v"),
    "gpipe": ("gpipe", 1, "loop"),
    "1f1b": ("1f1b", 1, "loop"),
    "interleaved": ("interleaved", 2, "loop"),
    "zero-bubble": ("zero-bubble", 1, "loop"),
    "zero-bubble, v": ("zero-bubble", 2, "v"),
}
MEMBERS = ("blocks", "modules", "factories")
STEPS, ROWS = 5, 2


def main() -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds for a case; 8 ranks need cores to keep to 60",
    )
    options = parser.parse_args()
    grids = itertools.product(
        *(map(int, sizes.split(",")) for sizes in (options.stages, options.tp))
    )
    cases = [
        (stages, tp, form, count)
        for stages, tp in grids
        for form in FORMS
        for count in sorted({max(1, stages // 2), stages, 2 * stages})
    ]
    failures, started = 0, time.monotonic()
    for seed, (stages, tp, form, count) in enumerate(cases):
        schedule, chunks, placement = FORMS[form]
        pipeline = PipelinePlan(
            stages=stages,
            schedule=schedule,
            chunks=chunks,
            placement=placement,
            members=MEMBERS[seed % len(MEMBERS)],
            costs=None,
            rows=ROWS,
            micro_batches=(count,) * STEPS,
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                messages = differences(
                    draw(seed, tp, pipeline=pipeline),
                    options.ranks,
                    folder,
                    timeout=options.timeout,
                )
            except Exception as error:  # of a rank: the next case may do better
                messages = [str(error)]
        if messages:
            failures += 1
            where = f"pp {stages} x tp {tp}, {form}, {count} micro-batches"
            print(
                f"case {seed}, {where}: {len(messages)} differences",
                *messages[:5],
                sep="\n  ",
                flush=True,
            )
    print(
        f"{failures} of {len(cases)} trainings on {options.ranks} ranks differ,"
        f" {time.monotonic() - started:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
