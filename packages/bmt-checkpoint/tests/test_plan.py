"""``plan_load``: what a load writes, and what it says of a file that does not fit. Which keys are
missing or unexpected is what plain torch's ``load_state_dict`` says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bmt_checkpoint.format import ForeignEntry
from bmt_checkpoint.plan import plan_load
from bmt_core.errors import CheckpointError
from bmt_params.state.index import Index, TensorEntry


class Counted(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.loaded = state


def model() -> nn.Sequential:
    return nn.Sequential(Counted(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def index_of(state: Mapping[str, Any], ties: Mapping[str, str] | None = None) -> Index:
    entries = {
        name: TensorEntry(shape=value.shape, dtype=value.dtype, source=(ties or {}).get(name, name))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }
    return Index(entries=entries, metadata=getattr(state, "_metadata", {}))


def refusal(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_load(model, index_of(state), source="model.pt", strict=strict)
    return str(caught.value)


NAMES = sorted(model().state_dict())
MORE = ["0.gain", "2.0.scale", "3.weight", "step"]


@given(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(MORE)), st.booleans())
def test_keys_that_only_one_side_has_are_those_of_torch(
    dropped: set[str], added: set[str], is_elsewhere: bool
) -> None:
    plain, state = model(), model().state_dict()
    for name in dropped:
        del state[name]
    state |= {name: torch.zeros(2) for name in added}
    theirs = copy.deepcopy(plain).load_state_dict(state, strict=False)
    elsewhere = added if is_elsewhere else ()
    plan = plan_load(plain, index_of(state), source="", strict=False, elsewhere=elsewhere)
    assert sorted(plan.missing) == sorted(theirs.missing_keys)
    assert sorted(plan.unexpected) == ([] if is_elsewhere else sorted(theirs.unexpected_keys))
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    assert {step.value.source: id(step.target) for step in plan.steps} == {
        name: id(tensor) for name, tensor in tensors.items() if name in state
    }
    assert plan.sources == [step.value.source for step in plan.steps]
    kept = "0._extra_state" not in dropped
    assert plan.extra_states == ([(plain[0], {"calls": 3})] if kept else [])


def test_a_tied_parameter_is_written_once_and_needs_one_of_its_names() -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    both = index_of(tied.state_dict(), ties={"1.weight": "0.weight"})
    one = index_of({"1.weight": tied[0].weight})
    for index, source in ((both, "0.weight"), (one, "1.weight")):
        plan = plan_load(tied, index, source="", strict=True)
        assert [step.target is tied[0].weight for step in plan.steps] == [True]
        assert plan.sources == [source]
    # In a file that holds two tensors, the last name wins, as in torch.
    plan = plan_load(tied, index_of(tied.state_dict()), source="", strict=True)
    assert plan.sources == ["0.weight", "1.weight"]


class RenamesInCopy(nn.Module):
    """Was saved under another name once, and gives torch a renamed copy of the whole state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.inner = nn.Linear(2, 2, bias=False)

    def _load_from_state_dict(self, state: dict[str, Any], *args: Any) -> None:
        renamed = {key.replace("kernel", "weight"): value for key, value in state.items()}
        super()._load_from_state_dict(renamed, *args)


def test_modules_inside_do_not_see_the_copy_of_an_override_as_in_torch() -> None:
    outer = nn.Sequential(RenamesInCopy())
    state = {"0.kernel": torch.ones(2), "0.inner.kernel": torch.ones(2, 2)}
    theirs = copy.deepcopy(outer).load_state_dict(state, strict=False)
    plan = plan_load(outer, index_of(state), source="", strict=False)
    assert plan.missing == theirs.missing_keys == ["0.inner.weight"]
    assert plan.unexpected == theirs.unexpected_keys == ["0.inner.kernel"]
    assert plan.sources == ["0.kernel"]


@pytest.mark.parametrize(
    ("stored", "present", "fits"),
    [
        (torch.float64, torch.float16, True),
        (torch.float16, torch.float64, True),
        (torch.int64, torch.float32, True),
        (torch.int64, torch.int8, True),
        (torch.uint8, torch.bool, True),
        (torch.bool, torch.float32, True),
        (torch.float32, torch.complex64, True),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.bool, False),
        (torch.complex64, torch.float32, False),
        (torch.complex64, torch.int64, False),
    ],
)
def test_values_are_converted_as_torch_does_where_none_is_lost_in_kind(
    stored: torch.dtype, present: torch.dtype, fits: bool
) -> None:
    module = nn.Module()
    module.register_buffer("b", torch.zeros(2, dtype=present))
    state = {"b": torch.zeros(2, dtype=stored)}
    if fits:
        (step,) = plan_load(module, index_of(state), source="", strict=True).steps
        assert step.target is module.b
    else:
        expected = f"b: the file has {stored}, which {present} of the model cannot hold"
        assert expected in refusal(module, state)


def test_eight_complaints_and_eight_names_are_shown_and_the_rest_is_counted() -> None:
    for number in (8, 9, 12):
        layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(number))
        wrong = {name: torch.zeros(3) for name in layers.state_dict()}
        said = refusal(layers, wrong, strict=False)
        assert said.count("the file has shape (3,), the model (2, 2)") == 8
        absent = refusal(layers, {})
        assert "0.weight, 1.weight" in absent and absent.count(".weight") == 8
        for text, form in ((said, f"  and {number - 8} more"), (absent, f" and {number - 8} more")):
            assert (form in text) == (number > 8)


def test_the_remedy_is_to_load_less_only_where_that_helps() -> None:
    layer, good = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
    wrong = {**good, "weight": torch.zeros(3)}
    remedy = "pass strict=False"
    assert remedy in refusal(layer, {"weight": good["weight"]})
    assert remedy in refusal(layer, {**good, "more": torch.zeros(1)})
    assert remedy not in refusal(layer, wrong)
    assert remedy not in refusal(layer, {**wrong, "more": torch.zeros(1)}, strict=False)
    assert "Linear; nothing was loaded" in refusal(layer, wrong)


def test_a_dict_in_the_file_that_may_be_the_state_dict_is_named() -> None:
    layer = nn.Linear(2, 2)
    state = {name: ForeignEntry(type_name=name) for name in ("dict", "OrderedDict", "int")}
    said = refusal(layer, {**layer.state_dict(), **state})
    assert "dict, OrderedDict in the file is a dict of its own" in said
    assert "weight: the file has a int, the model a tensor" in refusal(
        layer, {**layer.state_dict(), "weight": ForeignEntry(type_name="int")}
    )
