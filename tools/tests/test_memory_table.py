"""The pages have the tables of the formulas, and the traffic is that of the collectives.
``packages/bmtrain/tests/test_memory.py`` compares the formulas with memory that was measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import memory_table
from bmtrain._program.model_shape import MODELS
from memory_table import SHOWN, received_bytes, tokens_to_hide_traffic


def test_sizes_are_those_of_the_models() -> None:
    sizes = [round(MODELS[name].parameters / 1e9, 2) for name in SHOWN.values()]
    assert sizes == [6.74, 13.02, 68.98]


def test_traffic_is_that_of_the_collectives() -> None:
    sizes = replace(MODELS["llama2-7b"], layers=10, block=100, outside=50)
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
