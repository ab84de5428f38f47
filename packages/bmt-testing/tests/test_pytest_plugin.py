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

from bmt_testing import run_ranks


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
    plugin = [
        "-p",
        "bmt_testing.pytest_plugin",
        "--strict-markers",
        "--import-mode=importlib",
        "-rs",
    ]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--rootdir",
            str(tmp_path),
            *plugin,
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
    assert "3 tests ran on several ranks\n" in result.stdout
    if torch.cuda.is_available():
        assert "1 failed, 4 passed" in result.stdout
    else:
        assert "1 failed, 3 passed, 1 skipped" in result.stdout
        assert "needs a CUDA device: torch.cuda.is_available() is False" in result.stdout
