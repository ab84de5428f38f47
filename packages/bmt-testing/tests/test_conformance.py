"""The conformance kits, run as people run them: names, reports, and deliberately wrong plugins.

The plugins that are installed here pass the kits in the kits' own tests, which the suite collects.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conformance_runs import KITS, run_kit, surprises


@pytest.mark.parametrize(
    "option",
    [
        # Ranks that wait for each other are found, or not, after seconds.
        pytest.param(option, marks=pytest.mark.slow("bmt-testing", "bmt-core", "bmt-watch"))
        if option == "--bmt-comm-backend"
        else option
        for option in KITS
    ],
)
def test_wrong_plugins_fail_the_rule_that_they_break(option: str, tmp_path: Path) -> None:
    assert surprises(option, KITS[option], tmp_path, drawn=1) == []


def test_the_report_is_a_table_for_a_readme_with_one_failure_where_a_closure_is_needed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = "lbfgs or (keeps_a_lock and (needs_to_see or file))"
    arguments = ["-k", chosen, "--bmt-plugin", "wrong_optimizers"]
    run_kit("--bmt-optimizer", ["keeps_a_lock", "lbfgs"], tmp_path, *arguments)
    found = capfd.readouterr().out
    assert (
        "Optimizer 'keeps_a_lock' of the plugin 'wrong_optimizers':\n\n"
        "| rule | result |\n|---|---|\n"
        "| What it needs to see can be found out | fails |\n"
        "| Its state goes through a file | passes |\n"
    ) in found
    of_lbfgs = found.partition("Optimizer 'lbfgs'")[2]
    first, *others = re.findall(r"^\| (.*) \|$", of_lbfgs, re.MULTILINE)[1:]
    assert first == "It steps without a closure | fails"
    assert len(others) > 10
    assert {result.split(" | ")[1] for result in others} == {"skipped: its step needs a closure"}


def test_the_report_says_why_a_rule_was_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-k", "scale_multiplies or powers_sum_of", "--bmt-plugin", "wrong_kernels"]
    run_kit("--bmt-kernels", ["scales_alone"], tmp_path, *arguments)
    found = capfd.readouterr().out
    assert "| Powers sum of nothing is zero | skipped: they have no powers_sum |\n" in found
    assert "| Scale multiplies in float32 and rounds once | passes |\n" in found


def test_a_kit_tests_what_was_asked_for_with_the_options_that_were_given(tmp_path: Path) -> None:
    (tmp_path / "needs_a_rate.py").write_text(
        "import torch\n"
        "from bmt_core.plugins.hookspecs import hookimpl\n"
        "class NeedsARate(torch.optim.SGD):\n"
        "    name = 'needs_a_rate'\n"
        "    def __init__(self, params, lr):\n"
        "        super().__init__(params, lr=lr)\n"
        "@hookimpl\n"
        "def bmt_optimizers():\n"
        "    return [NeedsARate]\n"
    )
    sys.path.append(str(tmp_path))
    options = ["--bmt-plugin", "needs_a_rate", "--bmt-optimizer-options", '{"lr": 0.02}']
    try:
        run = run_kit(
            "--bmt-optimizer", ["needs_a_rate"], tmp_path, *options, "-k", "file or group"
        )
    finally:
        sys.path.remove(str(tmp_path))
    assert not run.failed
    assert run.passed == {
        ("needs_a_rate", "each_group_is_stepped_with_its_own_options"),
        ("needs_a_rate", "its_state_goes_through_a_file"),
    }


def test_a_backend_that_was_asked_for_and_starts_nowhere_fails(tmp_path: Path) -> None:
    (tmp_path / "starts_nowhere.py").write_text(
        "from bmt_core.comm import CommBackend\n"
        "from bmt_core.errors import ConfigError\n"
        "from bmt_core.plugins.hookspecs import hookimpl\n"
        "class StartsNowhere(CommBackend):\n"
        "    name = 'starts_nowhere'\n"
        "    def __init__(self, context):\n"
        "        raise ConfigError('not here')\n"
        "    def new_group(self, ranks, name): ...\n"
        "    def close(self): ...\n"
        "@hookimpl\n"
        "def bmt_comm_backends():\n"
        "    return [StartsNowhere]\n"
    )
    sys.path.append(str(tmp_path))
    options = ["--bmt-plugin", "starts_nowhere", "-k", "broadcast"]
    try:
        run = run_kit("--bmt-comm-backend", ["starts_nowhere"], tmp_path, *options)
    finally:
        sys.path.remove(str(tmp_path))
    assert run.failed == {("starts_nowhere", "broadcast_copies_from_each_root")}
    assert not run.passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bmt-optimizer", "loin"], "No optimizer is named 'loin'. Did you mean 'lion'? Known: "),
        (["--bmt-axis", "ex"], "the axis 'ex' of size 2, which no active plugin provides"),
        (["--bmt-optimizer", "lion", "--bmt-plugin", "no_such"], "'no_such' cannot be imported"),
        (
            ["--bmt-optimizer", "lion", "--bmt-optimizer-options", "lr=1"],
            "--bmt-optimizer-options is no JSON, 'lr=1'",
        ),
    ],
)
def test_what_cannot_be_tested_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_kit("--bmt-optimizer", [], tmp_path, *arguments)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("ERROR: ") and message in line
    assert not run.passed and not run.failed


@pytest.mark.slow("bmt-testing")
def test_the_command_of_the_guide_works_in_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "bmt_testing.pytest_plugin", "-q"]
    kit = ["--pyargs", "bmt_testing.conformance", "--bmt-optimizer", "lion", "-k", "needs_to_see"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(
        [*command, *kit],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Optimizer 'lion' of the plugin 'bmt-lion' (bmt-lion 1.0.0):" in result.stdout
    assert "| What it needs to see can be found out | passes |" in result.stdout
