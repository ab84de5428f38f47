"""Every element of a parameter is owned by exactly one rank, aligned, and survives a change of the
number of ranks. Pure integers.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_params.shard import even_ranges
from bmt_zero import FlatLayout, flat_layout
from bmt_zero.flat_layout import ALIGNMENT

NUMELS = st.lists(st.integers(0, 3000), min_size=1, max_size=12)
RANKS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@given(NUMELS, ITEMSIZES, RANKS)
def test_every_element_is_owned_by_exactly_one_rank(
    numels: list[int], itemsize: int, ranks: int
) -> None:
    layout: FlatLayout = flat_layout(numels, itemsize, ranks)
    for index, numel in enumerate(numels):
        owned = [element for start, end in layout.ranges(index) for element in range(start, end)]
        assert owned == list(range(numel))


@given(NUMELS, ITEMSIZES, RANKS)
def test_parameters_and_slices_are_aligned_and_disjoint(
    numels: list[int], itemsize: int, ranks: int
) -> None:
    layout = flat_layout(numels, itemsize, ranks)
    step = ALIGNMENT // itemsize
    assert layout.total == layout.slice_length * ranks
    assert layout.slice_length % step == 0
    assert all(offset % step == 0 for offset in layout.offsets)
    ends = [offset + numel for offset, numel in zip(layout.offsets, numels, strict=True)]
    assert all(
        end <= offset for end, offset in zip(ends, [*layout.offsets[1:], layout.total], strict=True)
    )
    assert layout.total - sum(numels) < step * (len(numels) + ranks)


@given(NUMELS, ITEMSIZES, RANKS)
def test_pieces_cut_full_tensor_and_slices_at_the_parameters(
    numels: list[int], itemsize: int, ranks: int
) -> None:
    layout = flat_layout(numels, itemsize, ranks)
    full = torch.arange(layout.total)
    lengths, indices = layout.pieces()
    assert sum(lengths) == layout.total
    pieces = full.split(lengths)
    for number, index in enumerate(indices):
        offset = layout.offsets[number]
        assert torch.equal(pieces[index], full[offset : offset + numels[number]])
    for rank in range(ranks):
        own = full[rank * layout.slice_length :][: layout.slice_length]
        lengths, indices = layout.pieces(rank)
        assert sum(lengths) == layout.slice_length
        for number, index in enumerate(indices):
            start, end = layout.ranges(number)[rank]
            expected = full[layout.offsets[number] + start : layout.offsets[number] + end]
            assert torch.equal(own.split(lengths)[index], expected)


@given(NUMELS, st.lists(RANKS, min_size=2, max_size=3))
def test_values_survive_resharding_from_n_to_m_to_n_ranks(
    numels: list[int], worlds: list[int]
) -> None:
    wholes = [torch.arange(numel) + 10_000 * number for number, numel in enumerate(numels)]
    for ranks in worlds:
        layout = flat_layout(numels, 4, ranks)
        shards = [
            [whole[start:end] for start, end in layout.ranges(i)] for i, whole in enumerate(wholes)
        ]
        wholes = [torch.cat(parts) for parts in shards]
    for number, (whole, numel) in enumerate(zip(wholes, numels, strict=True)):
        assert torch.equal(whole, torch.arange(numel) + 10_000 * number)


@given(st.integers(0, 1000), RANKS)
def test_even_ranges_partition_the_elements(numel: int, ranks: int) -> None:
    ranges = even_ranges(numel, ranks)
    assert len(ranges) == ranks
    assert [element for start, end in ranges for element in range(start, end)] == list(range(numel))
    assert max(end - start for start, end in ranges) == -(-numel // ranks)
