"""Tensor parallelism in the benchmark: all toolkits train one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import run
from bench.models import SEED, SIZES, Embeddings, Head, TransformerBlock, fill
from bench.options import Options
from bench.sequence_first import sequence_first
from bench.training import token_loss
from bmt_testing import run_ranks

TINY = SIZES["tiny"]


def test_sequence_first_model_is_the_same_model() -> None:
    hidden: Any = torch.arange(2 * TINY.sequence).view(2, -1) % TINY.vocabulary
    rows: Any = hidden
    for number, kind in enumerate((Embeddings, TransformerBlock, Head)):
        unit = kind(TINY, torch.float64)
        fill(unit, TINY, seed=SEED + number, rounded_to=torch.float64)
        with torch.no_grad():
            for name, parameter in unit.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        counterpart = sequence_first(unit, TINY)
        hidden, rows = unit(hidden), counterpart(rows)
        torch.testing.assert_close(rows.transpose(0, 1), hidden)
    targets = torch.zeros(2, TINY.sequence, dtype=torch.long)
    torch.testing.assert_close(token_loss(rows, targets.t()), token_loss(hidden, targets))


@pytest.mark.slow("tools/bench/", "bmt-tp")
def test_parallel_toolkits_train_like_zero(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    options = (
        "--size tiny --tp 2 --dtype fp32 --batch 2 --toolkits bmt,bmt-tp,dtensor"
        " --warmup 1 --steps 5"
    )
    assert run_ranks(
        run.main, 2, [*options.split(), "--device", "cpu", "--output", str(output)], init=None
    ) == [0, 0]
    zero, *others = (json.loads(line) for line in output.read_text().splitlines())
    assert [record["toolkit"] for record in others] == ["bmt-tp", "dtensor"]
    for record in others:
        assert record["losses"] == pytest.approx(zero["losses"], rel=1e-6)
        assert record["tp"] == 2
        assert record["tokens_per_second"] == pytest.approx(
            2 * TINY.sequence / record["step_seconds"]
        )


def test_ranks_of_a_tensor_group_belong_to_the_case() -> None:
    (case,) = Options.parse(["--toolkits", "bmt-tp", "--tp", "2"]).cases()
    assert case.tp == 2 and case.optimizer == "adam"
