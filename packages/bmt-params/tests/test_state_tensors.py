"""A manager's state with names in place of its tensors, which checkpoints store apart."""

from __future__ import annotations

import torch

from bmt_params.state.state_tensors import (
    TensorName,
    TensorPart,
    has_references,
    parts_in,
    with_references,
    with_tensors,
)


def test_tensors_are_replaced_by_their_names_and_put_back() -> None:
    here = TensorPart(
        name="w/exp_avg",
        shape=torch.Size((3,)),
        dtype=torch.float32,
        parameter=torch.ones(3),
        value=lambda: torch.ones(3),
    )
    elsewhere = TensorName("other/exp_avg")  # of which another rank has a part
    state = {"w": {"exp_avg": here, "step": 4}, "other": [elsewhere, ("beta", 0.5)]}
    assert list(parts_in(state)) == [here]
    stored = with_references(state)
    assert has_references(stored) and not has_references({"w": {"step": 4}})
    restored = with_tensors(stored, lambda name: f"<{name}>")
    assert restored == {
        "w": {"exp_avg": "<w/exp_avg>", "step": 4},
        "other": ["<other/exp_avg>", ("beta", 0.5)],
    }
