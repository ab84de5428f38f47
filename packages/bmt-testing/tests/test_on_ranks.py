"""``on_ranks``: tests whose body runs on the ranks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import bmt_core
from bmt_core.plugins.hookspecs import hookimpl
from bmt_testing import on_ranks, rank_debugger
from bmt_testing.pool import rank_pool


@dataclass
class Pair:
    """Pickled by the name of a module that only ranks that have imported it know."""

    first: int
    second: int


def rank() -> int:
    return int(os.environ["RANK"])


@on_ranks(1, 2)
@pytest.mark.parametrize("pair", [Pair(1, 2), Pair(3, 4)])
def test_parameters_and_fixtures_reach_the_ranks(
    world_size: int, pair: Pair, tmp_path: Path
) -> None:
    assert pair.first + 1 == pair.second and bmt_core.world_size() == world_size
    (tmp_path / str(bmt_core.rank())).touch()
    bmt_core.synchronize()
    assert len(list(tmp_path.iterdir())) == world_size


@hookimpl
def bmt_run_started() -> None:
    """This file is a plugin."""


@on_ranks(2, init=lambda _: {"plugins": [sys.modules[__name__]]})
@pytest.mark.parametrize("module", [rank_debugger])
def test_modules_reach_the_ranks_by_name(module: ModuleType) -> None:
    plugins = [info.name for info in bmt_core.current().registry.describe()]
    assert module is rank_debugger and __name__ in plugins


@pytest.mark.parametrize("expected", ["red"])
@on_ranks(2, init=None, env={"BMT_TEST_COLOUR": "red"})
def test_options_are_those_of_run_ranks(expected: str) -> None:
    assert os.environ["BMT_TEST_COLOUR"] == expected and not bmt_core.is_initialized()


@on_ranks(1, 2, init=lambda world_size: {"tp_size": world_size})
def test_the_start_of_a_run_may_depend_on_the_number_of_ranks(world_size: int) -> None:
    assert bmt_core.current().topology.axis_size("tp") == world_size


@on_ranks(2, init=lambda _, seed: {"seed": seed})
@pytest.mark.parametrize("seed", [3, 4])
def test_the_start_of_a_run_may_depend_on_arguments_of_the_test(seed: int) -> None:
    assert torch.initial_seed() == seed


@on_ranks(1, init=None)
@torch.no_grad()
def test_further_decorators_apply_on_the_ranks() -> None:
    assert not torch.is_grad_enabled()


@on_ranks(3, init=None)
def fails_on_two_ranks_in_two_lines() -> None:
    found = {"rank": rank()}
    assert found["rank"] < 2, "the last rank"
    assert [value + 1 for value in found.values()] == [1]


def test_a_failure_shows_its_ranks_its_lines_and_their_values() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        fails_on_two_ranks_in_two_lines(world_size=3)  # type: ignore[call-arg]
    summary, first, second = str(caught.value).split("\n\n")
    assert summary.splitlines() == [
        "fails_on_two_ranks_in_two_lines failed on 2 of 3 ranks.",
        "  rank 0: returned",
        "  rank 1: AssertionError: assert [2] == [1]",
        "  rank 2: AssertionError: the last rank",
    ]
    assert (
        first.startswith("----- rank 1 -----")
        and "assert [value + 1 for value in found.values()] == [1]" in first
    )
    assert (
        second.startswith("----- rank 2 -----")
        and "AssertionError: the last rank\nassert 2 < 2" in second
    )
    assert "rank_process.py" not in first


@on_ranks(2, init=None)
def fails_alike() -> None:
    assert object() is None


def test_equal_failures_are_shown_once() -> None:
    with pytest.raises(
        pytest.fail.Exception,
        match=r"----- rank 0, 1 -----(\n.*)*assert <object object at 0x…> is None",
    ):
        fails_alike(world_size=2)  # type: ignore[call-arg]


@on_ranks(2, init=None)
def skips_on_rank_1() -> None:
    if rank() == 1:
        pytest.skip("nothing here")


@on_ranks(2, init=None)
def skips_on_rank_1_and_fails_on_rank_0() -> None:
    if rank() == 1:
        pytest.skip("nothing here")
    raise ValueError("rank 0 gave up")


def test_a_skip_on_one_rank_skips_unless_another_rank_fails() -> None:
    with pytest.raises(pytest.skip.Exception, match="nothing here"):
        skips_on_rank_1(world_size=2)  # type: ignore[call-arg]
    with pytest.raises(pytest.fail.Exception, match="rank 0 gave up"):
        skips_on_rank_1_and_fails_on_rank_0(world_size=2)  # type: ignore[call-arg]


@on_ranks(1, timeout=1.0, init=None)
def hangs() -> None:
    threading.Event().wait()


@on_ranks(1, init=None)
def returns_a_comparison() -> None:
    return rank() == 0  # type: ignore[return-value]


@on_ranks(1, init=None)
def takes(argument: object) -> None:
    pass


def test_a_test_that_hangs_or_returns_something_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 0: Hung: Killed after 1 s"):
        hangs(world_size=1)  # type: ignore[call-arg]
    with pytest.raises(
        pytest.fail.Exception, match=r"returns_a_comparison returned True\. A test returns nothing"
    ):
        returns_a_comparison(world_size=1)  # type: ignore[call-arg]


def test_what_ranks_cannot_have_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"argument 'argument' of takes cannot be sent .* such as tmp_path"
    ):
        takes(argument=threading.Lock(), world_size=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"such as @on_ranks\(1, 2\), and got \(\)"):
        on_ranks()

    @on_ranks(1)
    def inside() -> None:
        pass

    with pytest.raises(ValueError, match="top level of its module"):
        inside(world_size=1)  # type: ignore[call-arg]


FAILS = """
import os

from bmt_testing import on_ranks


@on_ranks(2, init=None, timeout=1.0)
def test_that_fails_on_rank_1():
    value = 7 * int(os.environ["RANK"])
    assert value == 0
"""


@pytest.mark.slow("bmt-testing")
def test_pdb_opens_in_the_terminal_of_the_rank_that_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--pdb", "-q", str(tmp_path)]
    in_a_terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *command]
    result = subprocess.run(
        in_a_terminal,
        input="p 6 * value\nq\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = result.stdout.replace("\r", "")
    assert ">>> rank 1 of 2 failed: AssertionError" in output, output + result.stderr
    assert "\n(Pdb) 42\n" in output
    assert output.count("(Pdb)") == 2  # none of pytest's own after it
    assert "rank 1: AssertionError: assert 7 == 0" in output and "1 failed" in output


def test_pdb_without_a_terminal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_debugger, "is_wanted", True)
    monkeypatch.setattr(rank_debugger, "TERMINAL", "/no/terminal")
    with pytest.raises(pytest.fail.Exception) as caught:
        fails_alike(world_size=2)  # type: ignore[call-arg]
    assert "there is no terminal (/no/terminal): start pytest in one" in str(caught.value)
    assert "----- rank 0, 1 -----" in str(caught.value)


class Made:
    """What a job makes in its run."""

    ended = 0

    def __init__(self, runtime: bmt_core.Runtime) -> None:
        runtime.at_shutdown.append(self.end)

    def end(self) -> None:
        Made.ended += 1


def job(*, is_wrong: bool = False) -> tuple[int, int]:
    """Return how many jobs this run has had, and how many of them have ended."""
    runtime = bmt_core.current()
    assert torch.initial_seed() == 3 and Made not in runtime._states
    runtime.state(Made)
    torch.manual_seed(5)
    jobs = getattr(runtime, "jobs", 0) + 1
    if jobs == 1:
        Made.ended = 0
    runtime.jobs = jobs  # type: ignore[attr-defined]
    store = runtime.backend.context.store
    assert store is not None and not store.check([f"seen by {runtime.rank}"])
    store.set(f"seen by {runtime.rank}", "")
    bmt_core.synchronize()
    if is_wrong and bmt_core.rank() == 1:
        raise ValueError("wrong")
    return jobs, Made.ended


def results(*, is_wrong: bool = False, **options: Any) -> list[object]:
    options = {"init": {"seed": 3}, **options}
    outcomes = rank_pool(2).outcomes(job, is_wrong=is_wrong, **options)
    return [outcome.error_type or outcome.value for outcome in outcomes]


def test_jobs_share_a_run_and_each_begins_anew() -> None:
    results(own_run=True)
    assert [results() for _ in range(3)] == [[(n, n - 1)] * 2 for n in (1, 2, 3)]
    assert results(env={"BMT_TEST": "1"}) == results(own_run=True) == [(1, 0)] * 2


def test_a_run_in_which_a_rank_has_failed_is_not_shared() -> None:
    results(own_run=True)
    assert [results() for _ in range(2)] == [[(n, n - 1)] * 2 for n in (1, 2)]
    assert results(is_wrong=True) == [(3, 2), "ValueError"]
    assert [results() for _ in range(2)] == [[(n, n - 1)] * 2 for n in (1, 2)]


@on_ranks(2)
def test_a_test_marks_its_run() -> None:
    bmt_core.current().mark = "shared"  # type: ignore[attr-defined]


@on_ranks(2, own_run=True)
def test_a_test_may_have_a_run_of_its_own() -> None:
    assert not hasattr(bmt_core.current(), "mark")


@on_ranks(2, init={"seed": 7})
@pytest.mark.parametrize("seed", [7, 8])
def test_what_a_job_replaces_in_the_run_is_restored(seed: int) -> None:
    runtime = bmt_core.current()
    assert runtime.settings.seed == 7 and runtime.topology.world_size == 2
    runtime.settings = dataclasses.replace(runtime.settings, seed=9)
    runtime.topology.world_size = 3
