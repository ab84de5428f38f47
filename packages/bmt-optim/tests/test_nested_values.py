"""States with tensors in lists, tuples and dicts, flattened and nested again."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_optim.state.nested_values import flattened, nested

KEYS = st.sampled_from(["left", "right", "step"])
VALUES: Any = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(torch.ones, st.integers(0, 3))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


def in_containers(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return in_containers(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in in_containers(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@given(st.dictionaries(KEYS, VALUES))
def test_every_tensor_is_a_value_of_its_own_and_goes_back_to_its_place(
    state: dict[str, Any],
) -> None:
    flat = flattened(state)
    tensors = [value for value in flat.values() if isinstance(value, torch.Tensor)]
    others = [value for value in flat.values() if not isinstance(value, torch.Tensor)]
    assert sorted(map(id, tensors)) == sorted(map(id, in_containers(state)))
    assert in_containers(others) == []
    again = nested(flat)
    assert list(map(id, in_containers(again))) == list(map(id, in_containers(state)))
    assert str(again) == str(state)


def test_what_stands_in_the_place_of_a_tensor_is_nested_in_its_stead() -> None:
    flat = flattened({"factors": [torch.zeros(2), (torch.zeros(3), None)]})
    changed = {key: 7 if isinstance(v, torch.Tensor) else v for key, v in flat.items()}
    assert nested(changed) == {"factors": [7, (7, None)]}
