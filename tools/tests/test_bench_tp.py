"""Tensor parallelism in the benchmark: all toolkits train one model, and parallel blocks compute
what the whole one does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import run, tp_block
from bench.fsdp2 import mesh_of
from bench.models import SEED, SIZES, Embeddings, Head, TransformerBlock, fill
from bench.options import Options
from bench.sequence_first import sequence_first
from bench.tp_block import Reference, disagreement, format_table
from bench.tp_blocks import BmtBlocks, DTensorBlocks, LocalBlock
from bench.training import token_loss
from bmt_testing import run_ranks

TINY = SIZES["tiny"]
CPU = torch.device("cpu")


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


def test_parallel_toolkits_train_like_zero(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    options = (
        "--size tiny --tp 2 --dtype fp32 --batch 2 --toolkits bmt,bmt-tp,dtensor,dtensor-half"
        " --warmup 1 --steps 5"
    )
    assert run_ranks(
        run.main, 2, [*options.split(), "--device", "cpu", "--output", str(output)], init=None
    ) == [0, 0]
    zero, *others = (json.loads(line) for line in output.read_text().splitlines())
    assert [record["toolkit"] for record in others] == ["bmt-tp", "dtensor", "dtensor-half"]
    for record in others:
        assert record["losses"] == pytest.approx(zero["losses"], rel=1e-6)
        assert record["tp"] == 2
        assert record["tokens_per_second"] == pytest.approx(
            2 * TINY.sequence / record["step_seconds"]
        )


def test_command_measures_blocks_and_compares_them(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    options = (
        "--size tiny --tokens 64,128 --dtype fp32 --blocks 2 --warmup 1 --loops 2 --rounds 2"
        " --device cpu"
    )
    variants = "dtensor eager,dtensor async,bmt eager,local eager"
    arguments = [
        *options.split(),
        "--variants",
        variants,
        "--output",
        str(output),
        "--trace",
        str(tmp_path / "traces"),
    ]
    assert run_ranks(tp_block.main, 2, arguments, init=None) == [0, 0]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["variant"], record["tokens"], record["status"]) for record in records] == [
        (variant, tokens, "skipped" if "async" in variant else "ok")
        for tokens in (64, 128)
        for variant in variants.split(",")
    ]
    compared = [
        (record["variant"], record["tokens"])
        for record in records
        if record["disagreement"] is not None
    ]
    assert compared == [("dtensor eager", 64), ("bmt eager", 64)]
    for record in records:
        if record["status"] == "ok":
            assert (
                len(record["rounds"]) == 2 and 0 < min(record["rounds"]) <= record["ms_per_block"]
            )
    assert len(list((tmp_path / "traces").glob("*.json.gz"))) == 6


def disagreement_of_wrong_blocks() -> list[float]:
    reference = Reference(TINY, torch.float32, CPU, 64)
    ratios = []
    for kind in (DTensorBlocks, BmtBlocks):
        blocks = kind(TINY, torch.float32, CPU, 1, mode="eager")
        parameter = dict(blocks.chain.named_parameters())["0.down.weight"]
        with torch.no_grad():
            parameter.data.mul_(1 + 1e-4)
        ratios.append(disagreement(blocks, reference)[0])
    return ratios


def test_block_that_computes_something_else_is_found() -> None:
    for ratios in run_ranks(disagreement_of_wrong_blocks, 2, init={"tp_size": 2}):
        assert min(ratios) > 10 * tp_block.MAX_ROUNDINGS


def shapes_of_one_rank() -> tuple[list[Any], list[Any]]:
    mesh_of(CPU)
    parallel = DTensorBlocks(TINY, torch.float32, CPU, 1, mode="eager").chain[0]  # type: ignore[index]
    local = LocalBlock(TINY, torch.float32, CPU)
    return (
        [(name, tuple(p.to_local().shape)) for name, p in parallel.named_parameters()],
        [(name, tuple(p.shape)) for name, p in local.named_parameters()],
    )


def test_local_block_has_the_shapes_of_one_rank() -> None:
    for parallel, local in run_ranks(shapes_of_one_rank, 2, init={"tp_size": 2}):
        assert local == parallel


def test_table_has_a_line_for_each_variant() -> None:
    def figures(variant: str, tokens: int, ms: float | None, **more: Any) -> tp_block.Figures:
        return tp_block.Figures(
            variant=variant, tokens=tokens, status="ok", ms_per_block=ms, **more
        )

    failed = tp_block.Figures(
        variant="bmt eager", tokens=4096, status="failed", reason="rank 0: a mistake"
    )
    rows = [
        figures("dtensor async", 2048, 4.25, fused_products=16),
        figures("bmt eager", 2048, 4, peak_allocated=2.5),
    ]
    assert format_table([*rows, failed], 4).splitlines() == [
        "| ms per block (peak GiB of a chain) | 2048 tokens | 4096 tokens |",
        "| --- | --- | --- |",
        "| dtensor async | 4.250 |  |",
        "| bmt eager | 4.000 (2.50) | failed |",
        "",
        "dtensor async, 2048 tokens: 16 fused products in a chain of 4",
    ]


def test_ranks_of_a_tensor_group_belong_to_the_case() -> None:
    (case,) = Options.parse(["--toolkits", "bmt-tp", "--tp", "2"]).cases()
    assert case.tp == 2 and case.optimizer == "adam"
