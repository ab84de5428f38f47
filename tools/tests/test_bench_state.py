"""The benchmark of saving and loading: every case runs and is recorded, and what bmt loads is what
was saved.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.state import main
from bmt_testing import run_ranks


def test_every_case_runs_on_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    options = f"--layers 2 --width 16 --rounds 1 --folder {tmp_path} --output {output}"
    assert run_ranks(main, 2, options.split(), init=None) == [0, 0]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 8 and all(len(record["seconds"]) == 1 for record in records)
    assert {record["bytes"] for record in records} == {2 * 4 * (12 * 16 * 16 + 9 * 16)}
    assert not (tmp_path / "bench-state").exists()
