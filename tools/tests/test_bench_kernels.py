"""The benchmark of the kernels: every case runs, and ratios are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.kernel_timing import COPY, Case, measure
from bench.kernels import main

CPU = torch.device("cpu")


def test_every_case_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.jsonl"
    options = f"--device cpu --elements 4000 --rounds 2 --rows 5 --classes 40,70 --output {output}"
    assert main(options.split()) == 0
    records = {
        record["name"]: record for record in map(json.loads, output.read_text().splitlines())
    }
    printed = capsys.readouterr().out
    for name in (
        "bmt, bf16, float32 master",
        "norm, bf16, bmt",
        "float32 to bf16, bmt",
        "forward, bmt, 5 × 70 bf16",
    ):
        assert records[name]["bandwidth"] > 0 and f"| {name} |" in printed
    assert records["torch fused AdamW, float32"]["of_peer"] == 1


def test_ratios_are_to_the_copy_and_to_the_first_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"copy": 1.0, "peer": 4.0, "ours": 2.0}
    monkeypatch.setattr("bench.kernel_timing._time_on_cpu", lambda run, device: seconds[run()])
    cases = [
        Case(COPY, lambda: "copy", moved=100),
        Case("peer", lambda: "peer", moved=100, is_peer=True),
        Case("ours", lambda: "ours", moved=50),
    ]
    copy, peer, ours = measure(cases, CPU, rounds=3)
    assert (copy.of_copy, peer.of_copy, ours.of_copy) == (1.0, 0.25, 0.25)
    assert (copy.of_peer, peer.of_peer, ours.of_peer, ours.peer) == (None, 1.0, 2.0, "peer")
