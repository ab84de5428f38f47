"""The benchmark of collectives: every operation runs and is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.collectives import OPERATIONS, main
from bmt_testing import run_ranks


def test_every_operation_runs_on_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    options = f"--device cpu --backend torch --sizes 1024,4096 --rounds 1 --output {output}"
    assert run_ranks(main, 2, options.split(), init=None) == [0, 0]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["operation"], record["bytes"]) for record in records] == [
        (operation, size) for operation in OPERATIONS for size in (1024, 4096)
    ]
    for record in records:
        factor = 0.5 if record["operation"].startswith(("all_gather", "reduce_scatter")) else 1.0
        assert record["bandwidth"] * record["in_row"] == pytest.approx(factor * record["bytes"])
