"""Layers over parts, against all possible splits."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmt_core.errors import ConfigError
from bmt_pipeline.layer_split import split_layers


@given(st.integers(1, 100), st.data())
def test_without_costs_the_first_parts_have_one_layer_more(
    num_layers: int, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, num_layers))
    split = split_layers(num_layers, parts)
    assert [layer for part in split for layer in part] == list(range(num_layers))
    longer = num_layers % parts
    assert list(map(len, split)) == [num_layers // parts + 1] * longer + [num_layers // parts] * (
        parts - longer
    )
    assert split_layers(num_layers, parts, [1] * num_layers) == split


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_with_costs_no_split_has_a_smaller_largest_part(
    costs: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    split = split_layers(len(costs), parts, costs)
    assert [layer for part in split for layer in part] == list(range(len(costs)))
    assert len(split) == parts and all(split)
    possible = (
        max(sum(costs[first:end]) for first, end in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), parts - 1)
    )
    assert max(sum(costs[layer] for layer in part) for part in split) == min(possible)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "3 layers cannot be split into 4 parts"),
        ((3, 0), "number of parts must be at least 1, and got 0"),
        ((3, 2, [1, 2]), "3 layers and 2 costs"),
        ((3, 2, [1, -2, 1]), "layer 1 has -2"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_layers(*arguments)
