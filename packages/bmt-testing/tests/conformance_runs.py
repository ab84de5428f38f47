"""Runs of the conformance kits in this process, and which rules plugins break.

As a program it runs each kit as a whole with each of the deliberately wrong plugins, and prints
what does not come out as it should: ``.venv/bin/python
packages/bmt-testing/tests/conformance_runs.py``. The suite runs the rule that each of them breaks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "bmt_testing.conformance"
KITS = {
    "--bmt-optimizer": "wrong_optimizers",
    "--bmt-comm-backend": "wrong_comm_backends",
    "--bmt-checkpoint-format": "wrong_checkpoint_formats",
    "--bmt-kernels": "wrong_kernels",
    "--bmt-axis": "wrong_axes",
}


@dataclass
class KitRun:
    """A pytest plugin that collects the results of a kit: ``(plugin, rule)`` of each test, without
    what tells its cases apart.

    ``drawn``: only the rule that each plugin ``breaks``, of it no case after one that fails, and
    so many tests of a plugin that breaks none.
    """

    breaks: Mapping[str, str] = field(default_factory=dict)
    drawn: int | None = None
    failed: set[tuple[str, str]] = field(default_factory=set)
    passed: set[tuple[str, str]] = field(default_factory=set)
    without_gpu: set[tuple[str, str]] = field(default_factory=set)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.drawn is None:
            return
        chosen: set[str] = set()
        for plugin, broken in self.breaks.items():
            own = [item for item in items if _test_of(item.nodeid)[0] == plugin]
            if broken:
                chosen |= {item.nodeid for item in own if _test_of(item.nodeid)[1] == broken}
                continue
            here = [item.nodeid for item in own if not item.get_closest_marker("gpu")]
            chosen |= set(random.Random(plugin).sample(here, min(self.drawn, len(here))))
        items[:] = [item for item in items if item.nodeid in chosen]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.drawn is not None and _test_of(item.nodeid) in self.failed:
            pytest.skip("another case of the rule has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(_test_of(report.nodeid))
        elif report.when == "call" and report.passed:
            self.passed.add(_test_of(report.nodeid))
        elif report.skipped and "needs a CUDA device" in str(report.longrepr):
            self.without_gpu.add(_test_of(report.nodeid))


def run_kit(
    option: str, names: Iterable[str], folder: Path, *arguments: str, run: KitRun | None = None
) -> KitRun:
    """Run the kit of ``option`` with the plugins ``names``, as from the empty ``folder``."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    run = KitRun() if run is None else run
    asked = [part for name in names for part in (option, name)]
    # The faulthandler of the pytest around this one stays as it is.
    plugins = ["bmt_testing.pytest_plugin", "no:faulthandler", "no:cacheprovider", "no:xdist"]
    pytest.main(
        [
            f"--config-file={folder / 'pytest.ini'}",
            "--capture=no",
            "--import-mode=importlib",
            *[part for plugin in plugins for part in ("-p", plugin)],
            "--pyargs",
            PACKAGE,
            *asked,
            *arguments,
        ],
        plugins=[run],
    )
    return run


def wrong_plugins(module: str) -> dict[str, str]:
    """Return the rule that each plugin of ``module`` breaks, by name; the empty text for one that
    breaks none.
    """
    return {wrong.name: wrong.breaks for wrong in importlib.import_module(module).WRONG}


def surprises(option: str, module: str, folder: Path, *, drawn: int | None = None) -> list[str]:
    """Run the kit with the wrong plugins of ``module``; return what does not come out as
    it should.
    """
    breaks = wrong_plugins(module)
    on_gpus = {wrong.name for wrong in importlib.import_module(module).WRONG if _needs_gpu(wrong)}
    run = run_kit(
        option,
        breaks,
        folder,
        "--bmt-plugin",
        module,
        "--tb=native",  # others read the sources for each of the failures, which are to be
        run=KitRun(breaks=breaks, drawn=drawn),
    )
    expected = {(name, rule) for name, rule in breaks.items() if rule}
    unseen = {(name, rule) for name, rule in run.without_gpu if name in on_gpus}
    passes_all: Collection[str] = {name for name, rule in breaks.items() if not rule}
    return [
        *[f"{name} passes: {rule}" for name, rule in sorted(expected - run.failed - unseen)],
        *[f"{name} fails: {rule}" for name, rule in sorted(run.failed - expected)],
        *[f"{name} was not tested" for name in passes_all if not _has_passed(run, name)],
    ]


def _needs_gpu(wrong: Any) -> bool:
    """Whether the mistake of a wrong plugin shows on GPUs only."""
    return getattr(wrong, "device_type", "cpu") == "cuda"


def _has_passed(run: KitRun, name: str) -> bool:
    return any(plugin == name for plugin, _ in run.passed)


def _test_of(nodeid: str) -> tuple[str, str]:
    """Return plugin and rule: ``path/test_optimizer.py::test_rule[plugin-case]``."""
    rule, _, case = nodeid.rpartition("::")[2].partition("[")
    return case.rstrip("]").partition("-")[0], rule.removeprefix("test_")


def main() -> int:
    """Run every kit whole, and return 1 if something does not come out as it should."""
    sys.path.append(str(Path(__file__).parent))
    found = []
    for option, module in KITS.items():
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(io.StringIO()):
                lines = surprises(option, module, Path(folder))
        print(f"{option}: {len(wrong_plugins(module))} plugins, {len(lines)} surprises", flush=True)
        found += lines
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
