"""The pytest side of the testing kit, in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = """
import os
from dataclasses import dataclass

import pytest

from bmt_testing import on_ranks, run_ranks


def world_size():
    return int(os.environ["WORLD_SIZE"])


@dataclass
class Own:
    value: int


def doubled(own):
    return Own(2 * own.value)


def test_on_one_rank():
    assert run_ranks(world_size, 1, init=None) == [1]


def test_on_two_ranks(run_ranks):
    assert run_ranks(world_size, 2, init=None) == [2, 2]
    assert run_ranks(doubled, 2, Own(3), init=None) == [Own(6), Own(6)]


def test_that_fails_on_two_ranks():
    assert run_ranks(world_size, 2, init=None) == [1, 1]


@pytest.mark.parametrize("value", [0, 7])
@on_ranks(1, 2, init=None)
def test_on_each_number_of_ranks(value, tmp_path):
    doubled = 2 * value
    assert int(os.environ["RANK"]) * doubled == 0 and tmp_path.exists()


@pytest.mark.ranks(4)
def test_that_starts_four_ranks_by_itself():
    pass


@pytest.mark.gpu
def test_on_gpu():
    pass


@pytest.mark.gpu(1000)
@on_ranks(2, init=None)
def test_on_many_gpus():
    raise ValueError
"""


CASES = ("1ranks-0", "1ranks-7", "2ranks-0")


@pytest.mark.slow("bmt-testing")
def test_tests_on_several_ranks_are_counted_and_gpu_tests_skipped_under_xdist(
    tmp_path: Path,
) -> None:
    pytest.importorskip("xdist")
    # Not below the current directory, so that no rank can import the module by the name that pytest
    # gives it.
    directory = tmp_path / "some-package" / "tests"
    directory.mkdir(parents=True)
    (directory / "test_something.py").write_text(TESTS)
    (tmp_path / "elsewhere").mkdir()
    options = ["--strict-markers", "--import-mode=importlib", "-rA"]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--rootdir",
            str(tmp_path),
            *options,
            "-n",
            "1",
            str(directory),
        ],
        cwd=tmp_path / "elsewhere",
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.findall(r"^(PASSED|FAILED) \S*::(\S+)", result.stdout, re.MULTILINE)
    has_gpu = torch.cuda.is_available()
    assert sorted(found) == [
        ("FAILED", "test_on_each_number_of_ranks[2ranks-7]"),
        ("FAILED", "test_that_fails_on_two_ranks"),
        *[("PASSED", f"test_on_each_number_of_ranks[{case}]") for case in CASES],
        *[("PASSED", "test_on_gpu")] * has_gpu,
        ("PASSED", "test_on_one_rank"),
        ("PASSED", "test_on_two_ranks"),
        ("PASSED", "test_that_starts_four_ranks_by_itself"),
    ], result.stdout
    assert "5 tests ran on several ranks\n" in result.stdout
    assert "rank 1: AssertionError: assert ((1 * 14) == 0" in result.stdout
    assert f"{1 if has_gpu else 2} skipped" in result.stdout
    reason = "torch.cuda.is_available() is False"
    assert has_gpu or f"needs a CUDA device: {reason}" in result.stdout


def test_pytest_finds_the_plugin_which_imports_torch_only_where_a_test_needs_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    test = "def test(pytestconfig):\n    assert pytestconfig.pluginmanager.has_plugin({!r})\n"
    without_torch = "    import sys\n    assert 'torch' not in sys.modules\n"
    (tmp_path / "test_it.py").write_text(test.format("bmt_testing.pytest_plugin") + without_torch)
    for options in ([], ["-p", "bmt_testing.pytest_plugin"]):
        command = [sys.executable, "-m", "pytest", "-q", *options]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
