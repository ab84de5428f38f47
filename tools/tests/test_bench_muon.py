"""The benchmark of Muon: every case steps, and what is printed follows from the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import muon
from bmt_testing import RankFailure, run_ranks

OPTIONS = ["--device=cpu", "--size=tiny", "--layers=2", "--rounds=2"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_case_steps_the_matrices_of_the_blocks(tmp_path: Path, ranks: int) -> None:
    options = [*OPTIONS, f"--output={tmp_path}/figures.jsonl"]
    assert run_ranks(muon.main, ranks, options, init=None) == [0] * ranks
    records = list(map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines()))
    muons = [muon.PLAIN, muon.WHOLE, *[muon.DTENSOR] * (ranks > 1)]
    assert [record["case"] for record in records] == [*muons, muon.ADAM]
    for record in records:
        assert record["elements"] == 2 * (3 + 1 + 4 + 4) * 64 * 64
        assert 0 < record["quickest"] <= record["seconds"]
        assert record["of_plain"] == pytest.approx(record["seconds"] / records[0]["seconds"])


def other_updates(options: list[str]) -> int:
    """Run the benchmark with a Muon over whole tensors that has another learning rate."""
    right: Any = muon._whole_step
    muon._whole_step = lambda matrices: right([{"params": matrices, "lr": 2e-3}])
    try:
        return muon.main(options)
    finally:
        muon._whole_step = right


def test_steps_that_differ_from_plain_torchs_are_not_timed() -> None:
    with pytest.raises(RankFailure, match="does not step as Muon: torch, one process: matrix"):
        run_ranks(other_updates, 2, OPTIONS, init=None)
