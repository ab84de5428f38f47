"""Programs that are forked where ranks are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmt_testing.programs import end_of, run_program, start_program

PROGRAM = """
import os, sys
print(sys.argv[1:], os.environ.get("GREETING"), __name__)
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_has_its_own_arguments_environment_and_output(tmp_path: Path) -> None:
    process = start_program(
        PROGRAM, tmp_path / "output", arguments=["a", "b"], environment={"GREETING": "hello"}
    )
    assert end_of(process) == 3
    assert (tmp_path / "output").read_text().splitlines() == [
        "['a', 'b'] hello __main__",
        "an error",
    ]


def test_what_a_program_raises_is_in_its_output(tmp_path: Path) -> None:
    status, output = run_program("import torch\nraise ValueError('wrong')", tmp_path / "output")
    assert status == 1 and output.endswith("ValueError: wrong\n")


@pytest.mark.parametrize("timeout", [0.0, 0.1])
def test_a_program_that_does_not_end_is_killed(tmp_path: Path, timeout: float) -> None:
    """Also before it has begun: its output is empty then."""
    waits = "import threading\nthreading.Event().wait()"
    assert run_program(waits, tmp_path / "output", timeout=timeout) == (-9, "")
