"""The pytest side of the testing kit, in a pytest of its own."""

from __future__ import annotations

import os
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


@on_ranks(2, init=None)
def test_that_runs_on_two_ranks(tmp_path):
    assert int(os.environ["RANK"]) in (0, 1) and tmp_path.exists()


@pytest.mark.ranks(4)
def test_that_starts_four_ranks_by_itself():
    pass


@pytest.mark.gpu
def test_on_gpu():
    pass
"""


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
    options = ["--strict-markers", "--import-mode=importlib", "-rs"]
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
    assert "4 tests ran on several ranks\n" in result.stdout
    if torch.cuda.is_available():
        assert "1 failed, 5 passed" in result.stdout
    else:
        assert "1 failed, 4 passed, 1 skipped" in result.stdout
        assert "needs a CUDA device: torch.cuda.is_available() is False" in result.stdout


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
