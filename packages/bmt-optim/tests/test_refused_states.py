"""States that ``OptimManager`` and optimizers refuse: an error on every rank, which says why, and
nothing has changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from managed_training import OPTIMIZERS, Training, assert_same, through_file
from scratch_axes import grid_with

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import CheckpointError
from bmt_core.run import runtime
from bmt_core.settings import MeshAxis
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, gather_state, scatter_state
from bmt_optim.lr_scheduler import Cosine, Exponential
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, rank_pool, run_ranks
from cells import cells


def refused(*words: str) -> Any:
    """Expect an error that has ``words``, in this order."""
    return pytest.raises(CheckpointError, match=".*".join(map(re.escape, words)))


# Of other ranks


def rank_state() -> Any:
    training = Training("bmt", torch.float32)
    training.run(range(2))
    return through_file(training.manager.state_dict())


def load_error(states: list[Any]) -> str:
    training = Training("bmt", torch.float32)
    before = training.result()
    with pytest.raises(CheckpointError) as caught:
        training.manager.load_state_dict(states[runtime.rank()])
    assert_same(training.result(), before)
    assert not training.manager.optimizers[0].state
    return str(caught.value)


def test_a_state_of_another_world_size_is_refused_on_every_rank() -> None:
    saved = run_ranks(rank_state, 4)
    expected = (
        "The optimizer state was saved by one of 4 ranks, and this run has 2. Save with"
        " state_dict(gather_opt=True)"
    )
    for message in run_ranks(load_error, 2, saved):
        assert message.startswith(expected)


@on_ranks(2)
def test_a_state_of_another_rank_is_refused_on_every_rank() -> None:
    of_rank_0 = all_gather_object(rank_state(), runtime.current().world)[0]
    reason = "The optimizer state is that of rank 0, and this is rank 1."
    prefix = "" if runtime.rank() == 1 else "Rank 1 failed in OptimManager.load_state_dict: "
    assert load_error([of_rank_0, of_rank_0]) == prefix + reason


def stepped(kind: Any, p: torch.nn.Parameter) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([p])
    p.grad = torch.full_like(p, runtime.rank() + 1)
    optimizer.step()
    return optimizer


@on_ranks(2)
@cells("kind", [AdamOptimizer, AdamOffloadOptimizer, torch.optim.AdamW])
def test_an_optimizers_own_state_of_another_rank_is_refused(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    optimizer = stepped(kind, DistributedParameter(torch.ones(4, 3)))
    state = optimizer.state_dict()
    # One for each cell: rank 0 may have begun the next while rank 1 still reads.
    path = tmp_path / f"{kind.__name__}.pt"
    if runtime.rank() == 0:
        torch.save(state, path)
    runtime.synchronize()
    of_rank_0 = torch.load(path, weights_only=True)
    moment = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].clone()
    if runtime.rank() == 0:
        optimizer.load_state_dict(of_rank_0)
    else:
        with refused("The optimizer state is that of rank 0", "this is rank 1"):
            optimizer.load_state_dict(of_rank_0)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)
    torchs = torch.optim.Adam([DistributedParameter(torch.ones(4, 3))])
    torchs.load_state_dict(state)
    assert torch.equal(torchs.state_dict()["state"][0]["exp_avg"], moment)
    # Of an older version.
    optimizer.load_state_dict({key: of_rank_0[key] for key in ("state", "param_groups")})
    whole = stepped(kind, torch.nn.Parameter(torch.ones(4, 3)))
    assert whole.state_dict().keys() == {"state", "param_groups"}


def column_slice() -> DistributedParameter:
    topology = runtime.current().topology
    whole = torch.arange(16.0).view(4, 4)
    own = whole.chunk(topology.axis_size("tp"), 1)[topology.axis_rank("tp")]
    return DistributedParameter(own.contiguous(), tp_mode=True, tp_split_dim=1)


def states_of_columns(kind: Any) -> Any:
    optimizer, manager = stepped(kind, column_slice()), OptimManager()
    manager.add_optimizer(optimizer)
    return through_file(optimizer.state_dict()), through_file(manager.state_dict())


def load_errors_of_columns(kind: Any, states: list[Any]) -> list[str]:
    own, of_manager = states[runtime.rank()]
    optimizer, manager = kind([column_slice()]), OptimManager()
    manager.add_optimizer(optimizer)
    with pytest.raises(CheckpointError) as first:
        optimizer.load_state_dict(own)
    with pytest.raises(CheckpointError) as second:
        manager.load_state_dict(of_manager)
    assert not optimizer.state
    return [str(first.value), str(second.value)]


@cells("kind", [AdamOptimizer, torch.optim.AdamW])
def test_a_state_of_another_grid_of_as_many_ranks_is_refused(
    kind: type[torch.optim.Optimizer],
) -> None:
    # Two columns, and two rows: parts of the same size with other elements.
    saved = run_ranks(
        states_of_columns, 2, kind, init=grid_with(MeshAxis("tp", 2, 100, shards_data=False))
    )
    for messages in run_ranks(load_errors_of_columns, 2, kind, saved):
        for message in messages:
            assert re.search(r"\btp=2\b.*\bdp=2\b.*gather_opt=True", message), message


# Of other shapes


@on_ranks(2)
@cells(
    ("shape", "way"),
    [((4, 3), "scatter_state"), ((3, 4), "bmt.save_checkpoint"), ((1,), "bmt.save_checkpoint")],
)
def test_whole_states_of_plain_torch_are_refused_with_the_way_to_load_them(
    shape: tuple[int, ...], way: str
) -> None:
    state = stepped(torch.optim.AdamW, torch.nn.Parameter(torch.ones(shape))).state_dict()
    optimizer = torch.optim.AdamW([DistributedParameter(torch.ones(4, 3))])
    with refused(f"has exp_avg of shape {shape} for a part of shape (6,)") as caught:
        optimizer.load_state_dict(state)
    assert way in str(caught.value) and not optimizer.state
    assert shape != (4, 3) or "docs/checkpoints.md" in str(caught.value)


@on_ranks(2)
@cells("is_distributed", [False, True])
@cells(
    ("kind", "shape"),
    [("bmt", (3, 4)), ("bmt", (1,)), ("bmt", ()), ("momentum", (3, 4)), ("momentum", (1,))],
)
def test_a_state_of_a_parameter_of_another_shape_is_refused(
    is_distributed: bool, kind: str, shape: tuple[int, ...]
) -> None:
    def manager_of(shape: tuple[int, ...]) -> OptimManager:
        value, manager = torch.ones(shape), OptimManager()
        p = DistributedParameter(value) if is_distributed else torch.nn.Parameter(value)
        manager.add_optimizer(OPTIMIZERS[kind]([("p", p)]))
        p.grad = torch.ones_like(p)
        manager.step()
        return manager

    saved, here = manager_of(shape), manager_of((5, 3))
    before = through_file(here.state_dict()["optimizers"][0]["state"][0])
    with refused(f"is of a parameter of shape {shape or (1,)}, and here it has (5, 3)."):
        here.load_state_dict(saved.state_dict(gather_opt=True))
    with refused("of parameter 0 has ", "and the parameter here has ("):  # as of another maker
        here.load_state_dict(
            {"optimizers": saved.state_dict()["optimizers"], "lr_schedulers": [None]}
        )
    assert_same(here.state_dict()["optimizers"][0]["state"][0], before)


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


@on_ranks(2)
@cells("is_gathered", [False, True])
@cells("is_sharded", [False, True])
@cells("kind", KINDS)
def test_an_entry_of_another_shape_is_refused_on_every_rank_and_changes_nothing(
    kind: str, is_sharded: bool, is_gathered: bool
) -> None:
    manager, p = trained(kind, is_sharded=is_sharded)
    saved = manager.state_dict(gather_opt=is_gathered)
    before = copy.deepcopy(manager.optimizers[0].state[p])
    for shape, other in OTHERS.items():
        state = copy.deepcopy(saved)
        if is_gathered:  # rank 0 alone has the entries
            entry = state["logical"]["parameters"].get("p", {})
        else:
            entry = (
                state["optimizers"][0]["state"][0]
                if runtime.rank() == runtime.world_size() - 1
                else {}
            )
        if entry:
            entry["exp_avg"] = other
        with refused("exp_avg") as caught:
            manager.load_state_dict(state)
        words = {"()": ["()", "a number"], "no tensor": ["no tensor", "a number"]}.get(
            shape, [shape]
        )
        assert any(word in str(caught.value) for word in words)
    now = manager.optimizers[0].state[p]
    assert all(
        torch.equal(torch.as_tensor(now[key]), torch.as_tensor(value))
        for key, value in before.items()
    )
    manager.load_state_dict(saved)


@pytest.mark.parametrize("shape", OTHERS)
def test_an_entry_of_another_shape_is_refused_in_a_state_that_torch_saved(shape: str) -> None:
    manager, _ = trained("torch", is_sharded=False)
    # Does not tell with which shapes it was saved.
    state = copy.deepcopy(manager.optimizers[0].state_dict())
    state["state"][0]["exp_avg"] = OTHERS[shape]
    with refused("The state of parameter 0 has exp_avg ", shape):
        manager.load_state_dict({"optimizers": [state], "lr_schedulers": [None]})


def test_moments_may_be_left_out_to_start_anew() -> None:
    manager, p = trained("torch", is_sharded=False)
    for is_gathered in (False, True):
        state = copy.deepcopy(manager.state_dict(gather_opt=is_gathered))
        (
            state["logical"]["parameters"]["p"]
            if is_gathered
            else state["optimizers"][0]["state"][0]
        ).clear()
        manager.load_state_dict(state)
        assert not manager.optimizers[0].state.get(p)
        manager.step()


@on_ranks(2)
def test_gathered_state_that_does_not_fit_is_refused_on_every_rank() -> None:
    training = Training("bmt", torch.float32)
    training.run(range(1))
    # Rank 0 alone has the contents, and so it alone spoils them.
    first, second = (gather_state(training.manager, training.params) for _ in range(2))
    if runtime.rank() == 0:
        del first["bias"]
        second["weight"]["exp_avg"] = second["weight"]["exp_avg"].t().contiguous()
    weight = training.params["weight"]
    before = training.manager.optimizers[0].state[weight]["exp_avg"].clone()
    for state, message in [
        (first, "The optimizer state has nothing about 1 of 6 parameters, the first is 'bias'."),
        (
            second,
            "The state of 'weight' has exp_avg of shape (5, 3), and the parameter here has (3, 5).",
        ),
        ({}, "Rank 0 was given no optimizer state."),
    ]:
        with refused(message):
            scatter_state(training.manager, training.params, state)
    with refused("of optimizer 0, of shape", "is not among the named parameters"):
        gather_state(training.manager, {"weight": weight})
    assert torch.equal(training.manager.optimizers[0].state[weight]["exp_avg"], before)


# Of other managers


def test_a_state_of_other_optimizers_or_parameters_is_refused() -> None:
    training = Training("bmt", torch.float32)
    training.run(range(1))
    state = training.manager.state_dict()
    fewer = OptimManager()
    fewer.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    with refused("The state is of 2 optimizers, 1 with a scheduler; this manager has 1, 0"):
        fewer.load_state_dict(state)
    other = OptimManager()
    first = AdamOptimizer([torch.nn.Parameter(torch.zeros(3)) for _ in range(3)])
    other.add_optimizer(first, Exponential(first, 1.0, 0, 10))
    other.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]))
    with refused("The state of optimizer 0 is of parameters of other shapes"):
        other.load_state_dict(state)
    assert not first.state and other.loss_scale == 1


def test_a_state_of_another_kind_of_scheduler_is_refused() -> None:
    managers = OptimManager(), OptimManager()
    for manager in managers:
        p = torch.nn.Parameter(torch.ones(1))
        p.grad = torch.ones(1)
        optimizer = AdamOptimizer([p], lr=1.0)
        is_torchs = manager is managers[1]
        manager.add_optimizer(
            optimizer,
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            if is_torchs
            else Cosine(optimizer, 1.0, 0, 10),
        )
        manager.step()
    for one, other, key in ((*managers, "last_epoch"), (*managers[::-1], "num_iter")):
        with refused(f"The state of a scheduler has no {key!r}, which Cosine"):
            other.load_state_dict(one.state_dict())


def test_groups_in_another_order_are_refused_where_a_scheduler_has_their_rates_by_position() -> (
    None
):
    params = {name: torch.nn.Parameter(torch.ones(1)) for name in ("a", "b")}

    def manager_of(**rates: float) -> OptimManager:
        manager = OptimManager()
        groups = [{"params": [(name, params[name])], "lr": lr} for name, lr in rates.items()]
        optimizer = AdamOptimizer(groups)
        manager.add_optimizer(optimizer, Exponential(optimizer, 1.0, 0, 10))
        return manager

    state = manager_of(a=1.0, b=0.1).state_dict(gather_opt=True)
    manager_of(a=0.5, b=0.5).load_state_dict(state)
    with refused("in another order", "[1.0, 0.1]", "in this order: [a], [b]."):
        manager_of(b=1.0, a=0.1).load_state_dict(state)
    alike = manager_of(a=1.0, b=1.0).state_dict(gather_opt=True)
    manager_of(b=1.0, a=1.0).load_state_dict(alike)


def test_a_name_or_parameter_of_two_optimizers_is_refused_in_a_whole_state() -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    both = torch.nn.ModuleList(models)
    manager = OptimManager()
    for model in models:
        manager.add_optimizer(AdamOptimizer(model.named_parameters()))
    with refused("Two parameters of the optimizers have the name 'weight'."):
        manager.state_dict(gather_opt=True)
    assert len(gather_state(manager, both.named_parameters())) == 4
    manager.add_optimizer(torch.optim.SGD(models[0].parameters()))
    with refused("Parameter '0.weight' is in two groups"):
        manager.state_dict(gather_opt=True, named_parameters=both.named_parameters())


@pytest.mark.parametrize("value", [float("nan"), -1.0, None, "high"])
def test_a_loss_scale_that_is_none_is_noticed_before_anything_changes(value: Any) -> None:
    training, other = (Training("bmt", torch.float32) for _ in range(2))
    training.run(range(2))
    before = other.result()
    for state in (training.manager.state_dict(), training.manager.state_dict(gather_opt=True)):
        with refused("The state has no loss scale that can be used: "):
            other.manager.load_state_dict({**state, "loss_scale": value})
        assert_same(other.result(), before)
        assert not any(optimizer.state for optimizer in other.manager.optimizers)
    with refused("The state has no loss scale that can be used: "):
        other.manager.check_logical_state(
            None, {**training.manager.state_dict(gather_opt=True), "loss_scale": value}
        )


# What is no state


NO_STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (
        lambda state: None,
        "The state is None, not one that OptimManager.state_dict() returned.",
    ),
    "list": (lambda state: [state], "The state is of type list, not one that"),
    "no optimizers": (
        lambda state: {**state, "optimizers": None},
        "'optimizers' of the state is None, not a list.",
    ),
    "none in optimizers": (
        lambda state: {**state, "optimizers": [None]},
        "and this one is a NoneType.",
    ),
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


@on_ranks(2)
@cells("is_gathered", [False, True])
def test_what_is_no_state_on_one_rank_is_one_clear_error_on_every_rank(is_gathered: bool) -> None:
    manager, p = trained("torch", is_sharded=True)
    saved = manager.state_dict(gather_opt=is_gathered)
    before = manager.optimizers[0].state[p]["exp_avg"].clone()
    for spoil, expected in NO_STATES.values():
        with refused(expected) as caught:
            manager.load_state_dict(spoil(manager.state_dict()) if runtime.rank() == 1 else saved)
        first, second = all_gather_object(str(caught.value), runtime.current().world)
        assert first == f"Rank 1 failed in OptimManager.load_state_dict: {second}"
    assert torch.equal(manager.optimizers[0].state[p]["exp_avg"], before)


@on_ranks(2)
def test_a_gathered_state_on_one_rank_and_an_own_one_on_another_are_refused() -> None:
    manager, _ = trained("torch", is_sharded=True)
    states = [manager.state_dict(gather_opt=is_gathered) for is_gathered in (False, True)]
    with pytest.raises(CheckpointError) as caught:
        manager.load_state_dict(states[runtime.rank()])
    expected = (
        "Ranks [1] of 2 pass a gathered state, and the others one rank's. Pass one kind on"
        " all ranks."
    )
    assert str(caught.value) == expected


@on_ranks(2)
def test_what_is_no_logical_state_is_a_clear_error_on_every_rank() -> None:
    manager, _ = trained("torch", is_sharded=True)
    for load in (manager.load_logical_state, manager.check_logical_state):
        for state in (3, None if runtime.rank() == 0 else {}):
            with refused("The optimizer state is damaged, or not one that"):
                load(None, state)  # type: ignore[arg-type]


def test_an_optimizer_refuses_none_as_its_state() -> None:
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        with pytest.raises(
            CheckpointError, match="A state of an optimizer has 'state' and 'param_groups'"
        ):
            kind([torch.nn.Parameter(torch.ones(2))]).load_state_dict(None)  # type: ignore[arg-type]


def load_none_on_rank_1(kind: type[AdamOptimizer], is_gathered: bool) -> None:
    optimizer = kind([DistributedParameter(torch.ones(4, 3))])
    state = optimizer.state_dict(gather=is_gathered)
    optimizer.load_state_dict(None if runtime.rank() == 1 else state)  # type: ignore[arg-type]
    runtime.synchronize()


@pytest.mark.parametrize("is_gathered", [False, True])
def test_none_on_one_rank_is_an_error_there_and_ends_the_others(is_gathered: bool) -> None:
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        first, second = rank_pool(2).outcomes(
            load_none_on_rank_1, kind, is_gathered, init={"timeout": 20}, timeout=30
        )
        assert first.error_type == "CallError" and "Rank 1 has failed (CheckpointError" in (
            first.error_message or ""
        )
        assert second.error_type == "CheckpointError"
        assert "is a NoneType. Pass on every rank what state_dict()" in (second.error_message or "")
