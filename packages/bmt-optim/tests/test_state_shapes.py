"""Loading a state whose entries have other shapes, or that is no state at all: an error on every rank, and nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from bmt_core.errors import CheckpointError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_testing import rank_pool


class Momentum(torch.optim.Optimizer):
    """An optimizer of another library, of whose state nothing is known."""

    name: ClassVar[str] = "momentum"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p].setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": AdamOptimizer,
    "adam_offload": AdamOffloadOptimizer,
    "torch": torch.optim.AdamW,
    "another": Momentum,
}
OTHERS: dict[str, object] = {
    "(1,)": torch.ones(1),
    "()": torch.ones(()),
    "(1, 1)": torch.ones(1, 1),
    "(3, 5)": torch.ones(3, 5),
    "no tensor": 3.0,
}


def trained(kind: str, *, is_sharded: bool) -> tuple[OptimManager, torch.nn.Parameter]:
    value, manager = torch.arange(15.0).view(5, 3), OptimManager(sum_plain_gradients=False)
    p = DistributedParameter(value) if is_sharded else torch.nn.Parameter(value)
    manager.add_optimizer(KINDS[kind]([("p", p)]))
    p.grad = torch.full_like(p, runtime.rank() + 1.0) if is_sharded else torch.ones_like(p)
    manager.step()
    return manager, p


def load_errors(kind: str, is_sharded: bool, is_gathered: bool) -> list[str]:
    """The error for each of OTHERS in place of rank 1's ``exp_avg`` (in a gathered state rank 0's, which alone has it)."""
    manager, p = trained(kind, is_sharded=is_sharded)
    saved = manager.state_dict(gather_opt=is_gathered)
    before = copy.deepcopy(manager.optimizers[0].state[p])
    found = []
    for other in OTHERS.values():
        state = copy.deepcopy(saved)
        if is_gathered:
            entry = state["logical"]["parameters"].get("p", {})
        else:
            entry = state["optimizers"][0]["state"][0] if runtime.rank() == runtime.world_size() - 1 else {}
        if entry:
            entry["exp_avg"] = other
        with pytest.raises(CheckpointError) as caught:
            manager.load_state_dict(state)
        found.append(str(caught.value))
    now = manager.optimizers[0].state[p]
    assert all(torch.equal(torch.as_tensor(now[key]), torch.as_tensor(value)) for key, value in before.items())
    manager.load_state_dict(saved)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_another_shape_is_refused_on_every_rank_and_changes_nothing(
    run_ranks: Any, kind: str, is_sharded: bool, is_gathered: bool, world_size: int
) -> None:
    for errors in run_ranks(load_errors, world_size, kind, is_sharded, is_gathered):
        for shape, error in zip(OTHERS, errors, strict=True):
            words = {"()": ["()", "a number"], "no tensor": ["no tensor", "a number"]}.get(shape, [shape])
            assert "exp_avg" in error and any(word in error for word in words)


def raw_errors() -> list[str]:
    """What loading torch's own state says, which does not tell with which shapes it was saved."""
    manager, _ = trained("torch", is_sharded=False)
    found = []
    for other in OTHERS.values():
        state = copy.deepcopy(manager.optimizers[0].state_dict())
        state["state"][0]["exp_avg"] = other
        with pytest.raises(CheckpointError) as caught:
            manager.load_state_dict({"optimizers": [state], "lr_schedulers": [None]})
        found.append(str(caught.value))
    return found


def test_an_entry_of_another_shape_is_refused_in_a_state_that_torch_saved() -> None:
    for shape, error in zip(OTHERS, raw_errors(), strict=True):
        assert error.startswith("The state of parameter 0 has exp_avg ") and shape in error


def test_moments_may_be_left_out_to_start_anew() -> None:
    manager, p = trained("torch", is_sharded=False)
    for is_gathered in (False, True):
        state = copy.deepcopy(manager.state_dict(gather_opt=is_gathered))
        (state["logical"]["parameters"]["p"] if is_gathered else state["optimizers"][0]["state"][0]).clear()
        manager.load_state_dict(state)
        assert not manager.optimizers[0].state.get(p)
        manager.step()


NO_STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda state: None, "The state is None, not one that OptimManager.state_dict() returned."),
    "list": (lambda state: [state], "The state is of type list, not one that"),
    "no optimizers": (lambda state: {**state, "optimizers": None}, "'optimizers' of the state is None, not a list."),
    "none in optimizers": (lambda state: {**state, "optimizers": [None]}, "and this one is a NoneType."),
    "schedulers": (
        lambda state: {**state, "lr_schedulers": 3},
        "'lr_schedulers' of the state is of type int, not a list.",
    ),
    "entries": (
        lambda state: {**state, "optimizers": [{**state["optimizers"][0], "state": {0: 3}}]},
        "The optimizer state is damaged",
    ),
    "shapes": (lambda state: {**state, "value_shapes": [{0: 3}]}, "The optimizer state is damaged"),
    "another kind": (lambda state: {**state, "logical": 3}, "The optimizer state is damaged"),
}


def errors_of_no_state(is_gathered: bool) -> list[str]:
    manager, p = trained("torch", is_sharded=True)
    saved = manager.state_dict(gather_opt=is_gathered)
    before = manager.optimizers[0].state[p]["exp_avg"].clone()
    found = []
    for spoil, _ in NO_STATES.values():
        with pytest.raises(CheckpointError) as caught:
            manager.load_state_dict(spoil(manager.state_dict()) if runtime.rank() == 1 else saved)
        found.append(str(caught.value))
    assert torch.equal(manager.optimizers[0].state[p]["exp_avg"], before)
    return found


@pytest.mark.parametrize("is_gathered", [False, True])
def test_what_is_no_state_on_one_rank_is_one_clear_error_on_every_rank(run_ranks: Any, is_gathered: bool) -> None:
    first, second = run_ranks(errors_of_no_state, 2, is_gathered)
    for (_, expected), of_first, of_second in zip(NO_STATES.values(), first, second, strict=True):
        assert expected in of_second
        assert of_first == f"Rank 1 failed in OptimManager.load_state_dict: {of_second}"


def error_of_mixed_kinds() -> str:
    manager, _ = trained("torch", is_sharded=True)
    states = [manager.state_dict(gather_opt=is_gathered) for is_gathered in (False, True)]
    with pytest.raises(CheckpointError) as caught:
        manager.load_state_dict(states[runtime.rank()])
    return str(caught.value)


def test_a_gathered_state_on_one_rank_and_an_own_one_on_another_are_refused(run_ranks: Any) -> None:
    expected = "Ranks [1] of 2 pass a gathered state, and the others one rank's. Pass one kind on all ranks."
    assert run_ranks(error_of_mixed_kinds, 2) == [expected] * 2


def errors_of_a_logical_state() -> list[str]:
    manager, _ = trained("torch", is_sharded=True)
    found = []
    for load in (manager.load_logical_state, manager.check_logical_state):
        for state in (3, None if runtime.rank() == 0 else {}):
            with pytest.raises(CheckpointError) as caught:
                load(None, state)  # type: ignore[arg-type]
            found.append(str(caught.value))
    return found


def test_what_is_no_logical_state_is_a_clear_error_on_every_rank(run_ranks: Any) -> None:
    for errors in run_ranks(errors_of_a_logical_state, 2):
        assert all("The optimizer state is damaged, or not one that" in error for error in errors)


def test_an_optimizer_refuses_none_as_its_state() -> None:
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        with pytest.raises(CheckpointError, match="A state of an optimizer has 'state' and 'param_groups'"):
            kind([torch.nn.Parameter(torch.ones(2))]).load_state_dict(None)  # type: ignore[arg-type]


def load_none_on_rank_1(kind: type[AdamOptimizer], is_gathered: bool) -> None:
    optimizer = kind([DistributedParameter(torch.ones(4, 3))])
    state = optimizer.state_dict(gather=is_gathered)
    optimizer.load_state_dict(None if runtime.rank() == 1 else state)  # type: ignore[arg-type]
    runtime.synchronize()


@pytest.mark.parametrize("is_gathered", [False, True])
def test_none_on_one_rank_is_an_error_there_and_ends_the_others(is_gathered: bool) -> None:
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        first, second = rank_pool(2).outcomes(load_none_on_rank_1, kind, is_gathered, init={"timeout": 20}, timeout=30)
        assert first.error_type == "CallError" and "Rank 1 has ended" in (first.error_message or "")
        assert second.error_type == "CheckpointError"
        assert "is a NoneType. Pass on every rank what state_dict()" in (second.error_message or "")
