"""``Shard``: however a tensor is cut, its parts join to the whole, and a reduced gradient's part is
that of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_core.run import runtime
from bmt_params.shard import Shard, assemble_all, even_ranges, ranges_within
from bmt_testing import run_ranks


@dataclass(frozen=True)
class Cut:
    """A tensor of ``shape``, of which rank i holds elements ``ranges[i]``."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    replicated: bool
    dtype: torch.dtype


@st.composite
def cuts(draw: st.DrawFn, ranks: int) -> Cut:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    numel = torch.Size(shape).numel()
    replicated = draw(st.booleans())
    if replicated:
        ranges = ((0, numel),) * ranks
    elif draw(st.booleans()):
        ranges = even_ranges(numel, ranks)
    else:
        inner = st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1)
        ends = [*sorted(draw(inner)), numel]
        ranges = tuple(zip([0, *ends], ends, strict=False))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return Cut(shape, ranges, replicated, dtype)


def check(drawn: list[Cut]) -> None:
    for cut in drawn:
        check_parts(cut)
        check_reduction(cut)
    check_together(drawn)


def check_together(drawn: list[Cut]) -> None:
    group = runtime.current().topology.shard_group()
    shards = [Shard(torch.Size(cut.shape), cut.ranges, group, cut.replicated) for cut in drawn]
    wholes = [torch.randn(cut.shape, generator=torch.Generator().manual_seed(0)) for cut in drawn]
    wholes = [whole.to(cut.dtype) for whole, cut in zip(wholes, drawn, strict=True)]
    parts = [(shard, shard.part(whole)) for shard, whole in zip(shards, wholes, strict=True)]
    for found, whole in zip(assemble_all(parts), wholes, strict=True):
        assert found.equal(whole)


def check_parts(cut: Cut) -> None:
    group = runtime.current().topology.shard_group()
    shard = Shard(torch.Size(cut.shape), cut.ranges, group, cut.replicated)
    whole = torch.arange(float(shard.numel), dtype=cut.dtype).view(cut.shape)
    start, end = cut.ranges[group.rank]
    part = shard.part(whole)
    assert (shard.start, shard.end) == (start, end)
    assert part.equal(whole.flatten()[start:end])
    assert shard.assemble(part).equal(whole)
    for root in range(group.size):
        assembled = shard.assemble_on(root, part)
        if root == group.rank:
            assert assembled is not None and assembled.equal(whole)
        else:
            assert assembled is None
    rows = torch.full((group.size, shard.longest), -1, dtype=cut.dtype)
    shard.spread(whole, rows)
    for row, (start, end) in zip(rows, cut.ranges, strict=True):
        assert row[: end - start].equal(whole.flatten()[start:end])
        assert cut.replicated or row[end - start :].eq(-1).all()
    if not cut.replicated:
        padded = rows.flatten()
        joined = shard.joined(padded)
        assert joined.equal(whole)
        if cut.ranges == even_ranges(shard.numel, group.size):
            assert joined.data_ptr() == padded.data_ptr()  # a view


def check_reduction(cut: Cut) -> None:
    group = runtime.current().topology.shard_group()
    shard = Shard(torch.Size(cut.shape), cut.ranges, group, cut.replicated)
    # Small enough for sums that are exact in bfloat16.
    whole = torch.arange(float(shard.numel), dtype=cut.dtype).remainder(13).view(cut.shape)
    wide = torch.float32 if cut.dtype == torch.bfloat16 else cut.dtype
    total = whole.to(wide) * sum(range(1, group.size + 1))
    gradient = whole * (group.rank + 1)
    before = gradient.clone()
    for divisor in (1, 2):
        reduced = shard.reduce(gradient, divisor)
        assert reduced.dtype == wide and reduced.equal(shard.part(total) / divisor)
        assert gradient.equal(before)


@pytest.mark.parametrize("ranks", [1, 4])
@settings(max_examples=6)
@given(data=st.data())
def test_parts_join_to_the_whole_and_gradients_are_summed(ranks: int, data: st.DataObject) -> None:
    run_ranks(check, ranks, data.draw(st.lists(cuts(ranks), min_size=1, max_size=10)))


def saved(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    group = runtime.current().topology.shard_group()
    numel = torch.Size(shape).numel()
    replicated = Shard(torch.Size(shape), ((0, numel),) * group.size, group, replicated=True)
    uneven = ((0, 1), *((1, numel),) * (group.size - 1))
    return [replicated.saved_range, Shard(torch.Size(shape), uneven, group).saved_range]


def test_what_all_ranks_hold_is_saved_in_equal_shares() -> None:
    assert run_ranks(saved, 2, (3, 5)) == [[(0, 8), (0, 1)], [(8, 15), (1, 15)]]


PIECES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6)


@given(outer=PIECES, data=st.data())
def test_ranges_within_ranges_name_the_same_elements(
    outer: list[tuple[int, int]], data: st.DataObject
) -> None:
    ranges, position = [], 0
    for gap, length in outer:
        ranges.append((position + gap, position + gap + length))
        position += gap + length
    joined = [element for start, end in ranges for element in range(start, end)]
    ends = st.tuples(st.integers(0, len(joined)), st.integers(0, len(joined)))
    inner = [(min(pair), max(pair)) for pair in data.draw(st.lists(ends, max_size=4))]
    found = [i for start, end in ranges_within(ranges, inner) for i in range(start, end)]
    assert found == [element for start, end in inner for element in joined[start:end]]
