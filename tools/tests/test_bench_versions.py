"""The benchmark of two versions: each process trains with its own, and all take turns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import bmt_core
from bench.versions import PLACES, main


def test_two_versions_and_torch_take_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = Path(bmt_core.__file__).parent
    shutil.copytree(here, tmp_path / "bmt_core", ignore=shutil.ignore_patterns("__pycache__"))
    options = "--size tiny --dtype fp32 --device cpu --no-recompute --steps 5 --turns 3"
    assert main(["--before", str(tmp_path), *options.split()]) == 0
    first, second, third, *table = capfd.readouterr().out.splitlines()
    assert (first, third) == (f"torch: bmt of {here}", f"now: bmt of {here}")
    assert second == f"before: bmt of {tmp_path / 'bmt_core'}"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    assert [row[0] for row in rows] == [*PLACES]
    for row in rows:
        torch, before, now, of_before, of_now = map(float, row[1:6])
        assert min(torch, before, now) > 0
        layers = 3
        assert of_before == pytest.approx((before - torch) / layers, abs=0.006)
        assert of_now == pytest.approx((now - torch) / layers, abs=0.006)


def test_a_process_that_ends_ends_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "bmt_core").mkdir()
    (tmp_path / "bmt_core" / "__init__.py").write_text("raise ImportError('no version')\n")
    with pytest.raises(SystemExit, match="trains by before has ended"):
        main(["--before", str(tmp_path), "--size", "tiny", "--device", "cpu"])
