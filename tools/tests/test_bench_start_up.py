"""The benchmark of the start: both toolkits come to their second step, and every phase is noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.start_up import TOOLKITS, main
from bmt_testing import run_ranks


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_every_phase_is_measured_on_two_ranks(toolkit: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    options = f"--toolkit {toolkit} --size tiny --dtype fp32 --device cpu --output {output}"
    assert run_ranks(main, 2, options.split(), init=None) == [0, 0]
    (record,) = [json.loads(line) for line in output.read_text().splitlines()]
    names = [phase["name"] for phase in record["phases"]]
    assert len(names) == len(set(names)) == 16
    assert names[1:3] == ["import torch", "first optimizer of torch"]
    assert names[3:5] == ["import the toolkit", "start the run"]
    assert names[-1] == "second optimizer step"
    assert all(phase["seconds"] > 0 and phase["host"] > 0 for phase in record["phases"])
