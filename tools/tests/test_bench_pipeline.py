"""Pipelines in the benchmark: all variants compute one model, and a variant that cannot run does
not end the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import pipeline, run
from bench.models import SIZES
from bench.pipeline import Figures, bubble_in_theory, format_table
from bench.pipelines import ALONE, VARIANTS, Setting
from bench.training import make_batch, token_loss
from bmt_testing import run_ranks


def measured(tmp_path: Path, options: str, variants: str, codes: list[int]) -> list[dict[str, Any]]:
    output = tmp_path / "records.jsonl"
    small = (
        "--size tiny --micro-batch 1 --dtype fp32 --warmup 1 --steps 2 --device cpu"
        f" --output {output}"
    )
    assert (
        run_ranks(
            pipeline.main, 2, [*small.split(), *options.split(), "--variants", variants], init=None
        )
        == codes
    )
    return [json.loads(line) for line in output.read_text().splitlines()]


def loss_and_norm(micro_batches: int) -> tuple[float, float]:
    """Return those of the whole model, in one process, on all micro-batches at once."""
    setting = Setting(
        size=pipeline.with_layers("tiny", 4),
        dtype=torch.float32,
        device=torch.device("cpu"),
        micro_batch=1,
        recompute=False,
        level=2,
    )
    model = setting.part(0, 1)
    tokens, targets = make_batch(setting.size, batch=micro_batches, rank=0, device=setting.device)
    loss = token_loss(model(tokens), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(grads).item()


@pytest.mark.slow("tools/bench/", "bmt-pipeline")
def test_all_variants_compute_the_same_model(tmp_path: Path) -> None:
    alone, *others = measured(tmp_path, "--layers 4 --micro-batches 4", ",".join(VARIANTS), [0, 0])
    assert (
        len(alone["forward_seconds"]) == len(alone["backward_seconds"]) == 2
        and alone["loss"] is None
    )
    assert [(record["variant"], record["status"]) for record in others] == [
        (name, "ok") for name in VARIANTS if name != ALONE
    ]
    for record in others:
        assert (record["loss"], record["gradient_norm"]) == pytest.approx(
            loss_and_norm(4), rel=1e-5
        )
        assert len(record["seconds_of_steps"]) == 2 and 0 < record["bubble_in_theory"] < 1
        assert record["tokens_per_second"] == pytest.approx(
            4 * SIZES["tiny"].sequence / 2 / record["step_seconds"]
        )
        busy = [
            one + other
            for one, other in zip(alone["forward_seconds"], alone["backward_seconds"], strict=True)
        ]
        assert record["of_alone"] == pytest.approx(max(busy) * 4 / record["step_seconds"])
        assert record["bubble"] == pytest.approx(1 - sum(busy) / 2 * 4 / record["step_seconds"])


@pytest.mark.slow("tools/bench/", "bmt-pipeline")
@pytest.mark.parametrize("tp", [1, 2])
def test_pipelined_training_is_that_of_zero(tmp_path: Path, tp: int) -> None:
    output = tmp_path / "records.jsonl"
    options = (
        f"--size tiny --pp 2 --tp {tp} --micro-batch 1 --schedule 1f1b --dtype fp32 --batch 2"
        " --toolkits bmt,bmt-pp --warmup 1 --steps 5"
    )
    assert run_ranks(
        run.main, 2 * tp, [*options.split(), "--device", "cpu", "--output", str(output)], init=None
    ) == [0] * (2 * tp)
    zero, pipelined = (json.loads(line) for line in output.read_text().splitlines())
    assert (pipelined["toolkit"], pipelined["pp"], pipelined["schedule"]) == ("bmt-pp", 2, "1f1b")
    assert pipelined["losses"] == pytest.approx(zero["losses"], rel=1e-6)
    assert pipelined["tokens_per_second"] == pytest.approx(
        2 * SIZES["tiny"].sequence / pipelined["step_seconds"]
    )


def test_variant_that_cannot_run_does_not_end_the_others(tmp_path: Path) -> None:
    # Three layers have no four parts; three micro-batches of one row cannot come from two ranks.
    options = f"--layers 3 --micro-batches 3,2 --recompute --trace {tmp_path}"
    records = measured(
        tmp_path, options, f"torch zbv,bmt interleaved,bmt list,torch 1f1b,bmt 1f1b,{ALONE}", [1, 1]
    )
    assert [
        (record["variant"], record["micro_batches"], record["status"]) for record in records
    ] == [
        (ALONE, 2, "ok"),
        ("torch zbv", 2, "failed"),
        ("bmt interleaved", 2, "failed"),
        ("bmt list", 2, "ok"),
        ("bmt list", 3, "failed"),
        ("torch 1f1b", 2, "ok"),
        ("torch 1f1b", 3, "ok"),
        ("bmt 1f1b", 2, "ok"),
        ("bmt 1f1b", 3, "ok"),
    ]
    assert "cannot be split into 4 parts" in records[1]["reason"]
    losses = [record["loss"] for record in records if record["loss"] is not None]
    assert losses == pytest.approx(
        [losses[0], losses[0], losses[2], losses[0], losses[2]], rel=1e-6
    )
    assert len(list(tmp_path.glob("*.json.gz"))) == 6


def test_bubble_in_theory_is_that_of_the_papers() -> None:
    alike = ([1.0, 1.0], [2.0, 2.0])
    assert bubble_in_theory(VARIANTS["torch 1f1b"], 4, *alike) == pytest.approx(1 / 5)
    assert bubble_in_theory(VARIANTS["bmt interleaved"], 4, *alike) == pytest.approx(1 / 9)
    assert bubble_in_theory(VARIANTS["bmt zbv"], 4, *alike) == pytest.approx(1 / 25)
    slow_last = bubble_in_theory(VARIANTS["bmt gpipe"], 4, [1.0, 2.0], [2.0, 4.0])
    assert slow_last == pytest.approx(1 - (12 + 24) / 2 / (3 + 24))


def test_table_is_ordered_by_micro_batches() -> None:
    def figures(variant: str, count: int, **more: Any) -> Figures:
        return Figures(
            variant=variant,
            micro_batches=count,
            status="ok",
            step_seconds=0.5,
            tokens_per_second=100,
            **more,
        )

    rows = [
        figures(ALONE, 4, forward_seconds=[0.001, 0.002], backward_seconds=[0.003, 0.004]),
        figures(
            "bmt 1f1b",
            4,
            of_alone=0.8,
            bubble=0.25,
            bubble_in_theory=0.2,
            loss=4.5,
            gradient_norm=2,
        ),
        Figures(
            variant="bmt 1f1b", micro_batches=8, status="out of memory", reason="rank 1: too much"
        ),
        figures("bmt list", 4, peak_allocated=[1.25, 2]),
    ]
    assert format_table(rows).splitlines()[2:] == [
        "| stage alone | 4 | 0.5000 | 100 |  |  |  | – |  |  |",
        "| bmt 1f1b | 4 | 0.5000 | 100 | 0.800 | 25.0% | 20.0% | – | 4.500000 | 2.00000 |",
        "| bmt list | 4 | 0.5000 | 100 |  |  |  | 1.2, 2.0 |  |  |",
        "| bmt 1f1b | 8 | out of memory |  |  |  |  |  |  |  |",
        "",
        "bmt 1f1b: rank 1: too much",
        "ms of forward + backward of one micro-batch, by stage: 1.00 + 3.00, 2.00 + 4.00",
    ]
