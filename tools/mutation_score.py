#!/usr/bin/env python3
"""Mutation score: how many small mistakes, planted in the sources one at a time, make a test fail.

    pip install cosmic-ray
    python tools/mutation_score.py [--subject layout] [--mutants 25] [--seed 0] [--report FILE]
    python tools/mutation_score.py --again FILE    # what survived there, after tests were added

The mistakes are those of cosmic-ray (another operator, another number, a condition negated, a loop
that never runs ...). For each subject they are drawn at random: first the place in the source, then
the mistake. The tests run in a copy of the tree, with the Python of ``.venv``, and stop at the
first failure; tests that take more than three times as long as without a mistake count as failing.
Where no mistake can be noticed none is drawn: in annotations, in ``strict=True`` of ``zip``, which
is an assertion, and where ``is`` and ``==`` mean the same. What survives is printed with its line,
to be judged by a reader; what a reader has judged to change nothing that a test should notice is in
``mutation_survivors.toml``, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS_PYTHON = ROOT / ".venv" / "bin" / "python"
ACCEPTED = ROOT / "tools" / "mutation_survivors.toml"
SEED_OF_HYPOTHESIS = "0"

Position = tuple[int, int]


@dataclass(frozen=True)
class Subject:
    """Sources that get mistakes, and the files of tests that should find them, fast ones first.
    The examples in the sources' docstrings run after these.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


_ZERO = "packages/bmt-zero/src/bmt_zero"
_ZERO_TESTS = "packages/bmt-zero/tests"
_CP = "packages/bmt-cp/src/bmt_cp"

SUBJECTS = {
    "layout": Subject(
        (f"{_ZERO}/flat_layout.py", "packages/bmt-params/src/bmt_params/shard.py"),
        (
            "integration-tests/invariants/test_layout.py",
            "packages/bmt-params/tests/test_shard.py",
            "packages/bmt-checkpoint/tests/test_range_writer.py",
            "packages/bmt-params/tests/test_parameter.py",
        ),
    ),
    "topology": Subject(
        ("packages/bmt-core/src/bmt_core/run/topology.py",),
        (
            "integration-tests/invariants/test_topology.py",
            "packages/bmt-core/tests/test_plugins.py",
            "packages/bmt-core/tests/test_topology.py",
        ),
    ),
    "scaler": Subject(
        ("packages/bmt-optim/src/bmt_optim/loss_scale.py",),
        (
            "packages/bmt-optim/tests/test_loss_scale.py",
            "packages/bmt-optim/tests/test_manager.py",
            "packages/bmt-optim/tests/test_state.py",
        ),
    ),
    "gradients": Subject(
        (
            f"{_ZERO}/gradient_ledger.py",
            f"{_ZERO}/call_gradients.py",
            "packages/bmt-params/src/bmt_params/gradient_sum.py",
        ),
        (
            "packages/bmt-params/tests/test_gradient_sum.py",
            f"{_ZERO_TESTS}/test_gradient_ledger.py",
            f"{_ZERO_TESTS}/test_gradient_accumulation.py",
            f"{_ZERO_TESTS}/test_postponed_gradients.py",
            f"{_ZERO_TESTS}/test_linear_layers.py",
            "integration-tests/test_mean_gradients.py",
            "integration-tests/test_hybrid_sharding.py",
        ),
    ),
    "engine": Subject(
        (
            f"{_ZERO}/block_call.py",
            f"{_ZERO}/block_engine.py",
            f"{_ZERO}/block_layout.py",
            f"{_ZERO}/block_state.py",
            f"{_ZERO}/parameter_group.py",
            f"{_ZERO}/prefetch.py",
            f"{_ZERO}/recomputation.py",
        ),
        (
            f"{_ZERO_TESTS}/test_prefetch.py",
            f"{_ZERO_TESTS}/test_pending_updates.py",
            f"{_ZERO_TESTS}/test_recomputation.py",
            f"{_ZERO_TESTS}/test_recomputed_buffers.py",
            f"{_ZERO_TESTS}/test_engine.py",
            f"{_ZERO_TESTS}/test_postponed_gradients.py",
            f"{_ZERO_TESTS}/test_backward.py",
            f"{_ZERO_TESTS}/test_block.py",
            f"{_ZERO_TESTS}/test_writing_to_parameters.py",
            f"{_ZERO_TESTS}/test_linear_layers.py",
            f"{_ZERO_TESTS}/test_arguments_and_results.py",
            f"{_ZERO_TESTS}/test_gathered_memory.py",
            "integration-tests/invariants/test_collectives.py",
            "integration-tests/test_block_use.py",
            f"{_ZERO_TESTS}/test_failures.py",
            f"{_ZERO_TESTS}/test_nested_checkpoints.py",
            f"{_ZERO_TESTS}/test_copies.py",
            f"{_ZERO_TESTS}/test_key_value_caches.py",
            f"{_ZERO_TESTS}/test_tiles.py",
            f"{_ZERO_TESTS}/test_host_inputs.py",
            f"{_ZERO_TESTS}/test_param_dtype.py",
            "integration-tests/test_hybrid_sharding.py",
            "integration-tests/test_locality.py",
            "integration-tests/test_offload.py",
        ),
    ),
    "long sequences": Subject(
        (
            f"{_CP}/batch_parts.py",
            f"{_CP}/context_attention.py",
            f"{_CP}/context_group.py",
            f"{_CP}/exchange.py",
            f"{_CP}/guards.py",
            f"{_CP}/hugging_face.py",
            f"{_CP}/rows.py",
        ),
        (
            "packages/bmt-cp/tests/test_attention.py",
            "integration-tests/test_context_parallel.py",
            "integration-tests/test_context_parallel_state.py",
            "integration-tests/test_context_parallel_hugging_face.py",
        ),
    ),
    "checkpoint plan": Subject(
        (
            "packages/bmt-checkpoint/src/bmt_checkpoint/plan.py",
            "packages/bmt-checkpoint/src/bmt_checkpoint/range_writer.py",
            "packages/bmt-checkpoint/src/bmt_checkpoint/safetensors_layout.py",
        ),
        (
            "packages/bmt-checkpoint/tests/test_plan.py",
            "packages/bmt-checkpoint/tests/test_safetensors_layout.py",
            "packages/bmt-checkpoint/tests/test_range_writer.py",
            "packages/bmt-checkpoint/tests/test_checkpoint.py",
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One mistake: the ``occurrence``-th place of ``operator`` in ``source``, on ``line``."""

    source: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Outcome:
    """What came of one mistake; ``change`` are the removed and added lines.

    ``found_by`` is the first test that failed, and how; empty if none did.
    """

    subject: str
    mutant: Mutant
    found_by: str
    change: str
    seconds: float


_SAME_MEANING = frozenset(
    f"core/ReplaceComparisonOperator_{pair}"
    for pair in ("Is_Eq", "Eq_Is", "IsNot_NotEq", "NotEq_IsNot")
)


def main() -> int:
    """Run the subjects that were asked for and print the score of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--subject", action="append", choices=SUBJECTS, help="default: all")
    parser.add_argument("--mutants", type=int, default=25, help="per subject (default: 25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a JSON file of all outcomes")
    parser.add_argument("--again", type=Path, help="a report; run what survived, and write it anew")
    options = parser.parse_args()
    if find_spec("cosmic_ray") is None:
        parser.error("this script needs cosmic-ray, which bmt does not: pip install cosmic-ray")
    before = [] if options.again is None else read_report(options.again)
    names = options.subject or list(dict.fromkeys(o.subject for o in before)) or list(SUBJECTS)
    report = options.report or options.again
    outcomes = {outcome.mutant: outcome for outcome in before}
    with tempfile.TemporaryDirectory(prefix="bmt-mutation-") as folder:
        copy_of_tree(Path(folder))
        for name in names:
            if options.again is None:
                drawn = draw(
                    list(all_mutants(Path(folder), SUBJECTS[name].sources)),
                    options.mutants,
                    options.seed,
                )
            else:
                drawn = [o.mutant for o in before if o.subject == name and not o.found_by]
            for outcome in run_subject(name, Path(folder), drawn):
                outcomes[outcome.mutant] = outcome
                if report is not None:
                    entries = [asdict(outcome) for outcome in outcomes.values()]
                    report.write_text(json.dumps(entries, indent=1))
    print_scores(list(outcomes.values()))
    return 0


def read_report(path: Path) -> list[Outcome]:
    """Return the outcomes that ``--report`` has written."""
    return [
        Outcome(**{**entry, "mutant": Mutant(**entry["mutant"])})
        for entry in json.loads(path.read_text())
    ]


def print_scores(outcomes: Sequence[Outcome]) -> None:
    """Print what survived and was accepted, and a table of the subjects."""
    rows = []
    for name in dict.fromkeys(outcome.subject for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.subject == name]
        found = sum(bool(outcome.found_by) for outcome in own)
        accepted = sum(reason_to_accept(o) is not None for o in own if not o.found_by)
        rows.append(f"| {name} | {len(own)} | {found} | {accepted} | {found / len(own):.0%} |")
    print("\n| subject | mistakes | found | accepted | score |\n|---|---|---|---|---|")
    print("\n".join(rows))


@functools.cache
def accepted_survivors() -> dict[tuple[str, str], str]:
    """Return the reasons of ``mutation_survivors.toml``, by source and change."""
    entries = tomllib.loads(ACCEPTED.read_text())["survivor"]
    return {(entry["source"], entry["change"].strip()): entry["reason"] for entry in entries}


def reason_to_accept(outcome: Outcome) -> str | None:
    """Return why no test needs to find this mistake; None if one does."""
    return accepted_survivors().get((outcome.mutant.source, outcome.change.strip()))


def copy_of_tree(folder: Path) -> None:
    """Copy the files that git tracks into ``folder``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_subject(name: str, tree: Path, drawn: Sequence[Mutant]) -> Iterator[Outcome]:
    """Plant the mistakes in the sources of a subject, one at a time, run its tests, and yield what
    came of it.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    subject = SUBJECTS[name]
    tests = (*subject.tests, *subject.sources)
    started = time.monotonic()
    failed = first_failure(tree, tests, limit=1800)
    if failed:
        sys.exit(f"The tests of {name!r} fail without any mistake, first {failed}.")
    usual = time.monotonic() - started
    print(f"\n{name}: the tests take {usual:.0f} s", flush=True)
    for mutant in drawn:
        path = tree / mutant.source
        original = path.read_text()
        mutated = mutate_code(original, get_operator(mutant.operator)(), mutant.occurrence)
        if not is_python(mutated):  # cosmic-ray takes the stars of {**one} for a power
            continue
        started = time.monotonic()
        path.write_text(mutated)
        try:
            found_by = first_failure(tree, tests, limit=3 * usual + 60)
        finally:
            path.write_text(original)
        seconds = round(time.monotonic() - started, 1)
        outcome = Outcome(name, mutant, found_by, changed_lines(original, mutated), seconds)
        where = f"{mutant.source}:{mutant.line}"
        print(f"{'found   ' if found_by else 'SURVIVED'} {seconds:5.0f} s  {where}  {found_by}")
        if not found_by:
            reason = reason_to_accept(outcome)
            print(outcome.change if reason is None else f"{outcome.change}\naccepted: {reason}")
        sys.stdout.flush()
        yield outcome


def is_python(text: str) -> bool:
    """Whether ``text`` can be compiled."""
    try:
        compile(text, "mutated", "exec")
    except SyntaxError:
        return False
    return True


def all_mutants(tree: Path, sources: Sequence[str]) -> Iterator[Mutant]:
    """Yield every mistake in ``sources`` that could be noticed."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    for source in sources:
        text = (tree / source).read_text()
        nodes = list(ast_nodes(get_ast(text)))
        silent = list(silent_ranges(text))
        for operator in operator_names():
            kind = get_operator(operator)
            if kind.arguments() or operator in _SAME_MEANING:
                continue
            places = [place for node in nodes for place in kind().mutation_positions(node)]
            for occurrence, (start, _) in enumerate(places):
                if not any(begin <= start < end for begin, end in silent):
                    yield Mutant(source, operator, occurrence, start[0])


def silent_ranges(text: str) -> Iterator[tuple[Position, Position]]:
    """Yield where annotations and values of ``strict=`` begin and end, as (line, column)."""
    for node in ast.walk(ast.parse(text)):
        silent = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.keyword) and node.arg == "strict":
            silent.append(node.value)
        for found in silent:
            if isinstance(found, ast.expr):
                assert found.end_lineno is not None and found.end_col_offset is not None
                yield (
                    (found.lineno, found.col_offset),
                    (found.end_lineno, found.end_col_offset),
                )


def draw(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Draw ``number`` mistakes, on as many lines as possible: arithmetic has ten mistakes at each
    place, and would else be drawn ten times as often as a condition.
    """
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        lines.setdefault((mutant.source, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(lines), min(number, len(lines)))
    return [chance.choice(lines[line]) for line in chosen]


def first_failure(tree: Path, tests: Sequence[str], *, limit: float) -> str:
    """Run ``tests`` in ``tree`` until the first failure, and return that test's name and how it
    failed; empty if all pass, "the time" if they take more than ``limit`` seconds.
    """
    sources = [path for path in sorted(tree.glob("packages/*/src")) if "kernels" not in str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile what it imports
    env["COLUMNS"] = "200"  # of pytest's lines
    command = [
        *(str(TESTS_PYTHON), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"),
        *("-p", "no:xdist", "--hypothesis-seed", SEED_OF_HYPOTHESIS, *tests),
    ]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "the time"
    if process.returncode == 0:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(.+)", output, re.MULTILINE)
    return named[1] if named else f"exit status {process.returncode} of pytest"


def changed_lines(before: str, after: str) -> str:
    """Return the lines that differ, those removed with ``-`` and those added with ``+``."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++"))


if __name__ == "__main__":
    sys.exit(main())
