"""The formulas of docs/memory.md agree with memory that was measured, and the page with them."""

from __future__ import annotations

from pathlib import Path

import pytest

import memory_table
from benchmark_page import records
from memory_table import (
    COMPACT,
    FLOAT32_MASTER,
    MODELS,
    OFFLOADED,
    Bytes,
    Sizes,
    device_bytes,
    received_bytes,
    tokens_to_hide_traffic,
)

# The GPTs of tools/bench: a layer has 12 hidden² weights and 13 hidden biases and norms.
GPT_13B = Sizes(
    layers=40, hidden=5120, block=314_639_360, outside=12_693_100_000 - 40 * 314_639_360
)
GPT_3B = Sizes(layers=16, hidden=4096, block=201_379_840, outside=3_314_400_000 - 16 * 201_379_840)
WITHOUT_KERNELS = "bmt without bmt-kernels"
# model, level, GPUs, tokens of a GPU, optimizer; the record of its peak: file, toolkit, setting
MEASURED = [
    (GPT_13B, 3, 4, 512, COMPACT, ("fsdp2-four-h200", "bmt", "batch 1")),
    (GPT_13B, 3, 4, 8 * 512, COMPACT, ("fsdp2-four-h200", "bmt", "batch 8")),
    (GPT_13B, 3, 4, 32 * 512, COMPACT, ("fsdp2-four-h200", "bmt", "batch 32")),
    (GPT_13B, 2, 4, 512, COMPACT, ("fsdp2-four-h200", "bmt", "batch 1, level 2")),
    (GPT_13B, 3, 4, 8 * 512, FLOAT32_MASTER, ("float32-masters", WITHOUT_KERNELS, "batch 8")),
    (GPT_3B, 3, 1, 2 * 2048, COMPACT, ("offload", "bmt, all: AdamOptimizer", "batch 2")),
    (GPT_3B, 3, 1, 8 * 2048, COMPACT, ("offload", "bmt, all: AdamOptimizer", "batch 8")),
    (GPT_3B, 3, 1, 2 * 2048, OFFLOADED, ("offload", "bmt, none", "batch 2")),
    (GPT_3B, 3, 1, 8 * 2048, OFFLOADED, ("offload", "bmt, none", "batch 8")),
]


@pytest.mark.parametrize(("model", "level", "gpus", "tokens", "each", "record"), MEASURED)
def test_memory_is_what_benchmarks_measured(
    model: Sizes, level: int, gpus: int, tokens: int, each: Bytes, record: tuple[str, str, str]
) -> None:
    name, *of = record
    (peak,) = [
        float(measured.value)
        for measured in records(name)
        if [measured.toolkit, measured.setting, measured.quantity] == [*of, "peak"]
    ]
    found = device_bytes(model, level=level, shard=gpus, tokens=tokens, each=each) / 2**30
    assert found == pytest.approx(peak, rel=0.05)


def test_sizes_are_those_of_the_models() -> None:
    assert [round(model.total / 1e9, 2) for model in MODELS] == [6.74, 13.02, 68.98]


def test_traffic_is_that_of_the_collectives() -> None:
    sizes = Sizes(layers=10, hidden=8, block=100, outside=50)
    # 18 gathers and 10 reductions of blocks, one of each of all else; half comes from others.
    assert received_bytes(sizes, level=3, shard=2) == (28 * 100 + 2 * 50) * 2 / 2
    assert received_bytes(sizes, level=2, shard=2) == (20 * 100 + 2 * 50) * 2 / 2
    assert received_bytes(sizes, level=2, shard=2, micro_batches=3) == 3 * (2000 + 100)
    assert received_bytes(sizes, level=1, shard=2, micro_batches=3) == 2000 + 3 * 100
    assert received_bytes(sizes, level=0, shard=2) == 2 * 1000 * 4 / 2 + 100
    assert received_bytes(sizes, level=3, shard=1) == 0


def test_traffic_takes_as_long_as_products_at_the_number_of_tokens() -> None:
    parameters, flops, bandwidth = 7e9, 4e14, 2e11
    tokens = tokens_to_hide_traffic(flops=flops, bandwidth=bandwidth)
    assert 8 * parameters * tokens / flops == pytest.approx(6 * parameters / bandwidth)


@pytest.mark.parametrize("page", memory_table.PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_tables_of_the_formulas(page: Path) -> None:
    assert memory_table.with_tables(page) == page.read_text(), "Run tools/memory_table.py"
