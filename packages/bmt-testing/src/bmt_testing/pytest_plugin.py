"""The pytest plugin: marks, the fixture ``run_ranks``, and a count of the tests that ran on
several ranks.

Every pytest where bmt-testing is installed imports this module, so torch is imported where a test
needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bmt_testing import rank_debugger
from bmt_testing.largest_run import take_largest_run

pytest_plugins = ["bmt_testing.conformance.kit_plugin"]
_PROPERTY = "ranks"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and note the option ``--pdb``."""
    rank_debugger.is_wanted = bool(config.getoption("usepdb", False))
    config.addinivalue_line(
        "markers",
        "gpu(n): needs CUDA devices for n ranks (default: 1); skipped where there are fewer",
    )
    config.addinivalue_line(
        "markers", "ranks(n): starts n ranks by itself (torchrun), counted like a run of the pool"
    )
    # torch asks the name server for the name of each socket's address, in every process until an
    # answer is missing. By default the C library waits 5 s for an answer, twice.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there are too few GPUs."""
    wanted = [_ranks_of(*mark.args, **mark.kwargs) for mark in item.iter_markers("gpu")]
    if not wanted:
        return
    import torch

    from bmt_testing.gpus import RANKS_PER_GPU, gpu_ranks

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    if max(wanted) > gpu_ranks():
        pytest.skip(
            f"needs CUDA devices for {max(wanted)} ranks, and there are those for {gpu_ranks()};"
            f" see {RANKS_PER_GPU}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record the test's number of ranks in its report, which xdist's workers send to the
    main process.
    """
    mark = item.get_closest_marker("ranks")
    take_largest_run()
    try:
        return (yield)
    finally:
        largest = max(take_largest_run(), 0 if mark is None else mark.args[0])
        if largest > 1:
            item.user_properties.append((_PROPERTY, largest))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests ran on several ranks."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    count = sum(
        isinstance(report, pytest.TestReport)
        and report.when == "call"
        and _PROPERTY in dict(report.user_properties)
        for report in reports
    )
    if count:
        terminalreporter.write_line(f"{count} tests ran on several ranks")


@pytest.fixture(name="run_ranks")
def run_ranks_fixture() -> Callable[..., list[Any]]:
    """The function :func:`bmt_testing.run_ranks`."""
    from bmt_testing.pool import run_ranks

    return run_ranks


def _ranks_of(n: int = 1) -> int:
    return n
