"""In which order ``AdamOptimizer`` updates, what it launches together, and whom it tells."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bmt_core.ops import REFERENCE
from bmt_optim import AdamOptimizer
from bmt_optim.adam import update_plan


class Shard:
    """An owner that writes down what it is told."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def note_update(self, done: Any = None, reads: object = None) -> None:
        self.log.append(f"{self.name} changed")

    def wait_for_updates(self, *, despite_errors: bool = False) -> None:
        pass

    def note_replaced_memory(self) -> None:
        pass

    def reduce_held_back(self) -> None:
        pass

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return None

    def watch_reductions(self, watcher: Any) -> None:
        pass


def owned(data: torch.Tensor, shard: Shard) -> torch.nn.Parameter:
    p: Any = torch.nn.Parameter(data)
    p.owner_reference = weakref.ref(shard)
    return p  # type: ignore[no-any-return]


class Model:
    """Three blocks of three parameters, one of them without elements, and two parameters
    outside blocks.
    """

    def __init__(self, log: list[Any], dtype: torch.dtype = torch.float32) -> None:
        self.shards = {name: Shard(name, log) for name in ("a", "b", "c")}
        self.named = {"first": torch.nn.Parameter(torch.ones(2, dtype=dtype))}
        for name, shard in self.shards.items():
            for number, size in enumerate((4, 0, 3)):
                self.named[f"{name}{number}"] = owned(torch.ones(size, dtype=dtype), shard)
        self.named["last"] = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.give_gradients()

    def give_gradients(self) -> None:
        for p in self.named.values():
            p.grad = torch.ones_like(p)

    def names(self, params: list[torch.Tensor]) -> str:
        return " ".join(name for p in params for name, q in self.named.items() if q is p)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, list[Any]], None]:
    def watch(model: Model, log: list[Any]) -> None:
        class Recording:
            has_compact_adam = False

            @staticmethod
            def adam_step(params: list[torch.Tensor], *columns: Any, **options: Any) -> None:
                log.append(model.names(params))
                REFERENCE.adam_step(params, *columns, **options)

        monkeypatch.setattr("bmt_optim.adam.optimizer.kernels_on", lambda device: Recording)

    return watch


ORDER = [
    "first last",
    *("a0 a1 a2", "a changed"),
    *("b0 b1 b2", "b changed"),
    *("c0 c1 c2", "c changed"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_per_owner_in_the_order_of_parameters_each_told_at_once(
    watched: Any, dtype: torch.dtype
) -> None:
    log: list[Any] = []
    model = Model(log, dtype)
    watched(model, log)
    optimizer = AdamOptimizer(model.named.values())
    for _ in range(3):
        log.clear()
        optimizer.step()
        assert log == ORDER


def test_groups_that_cut_through_owners_do_not_delay_the_first_owner(watched: Any) -> None:
    log: list[Any] = []
    model = Model(log)
    watched(model, log)
    decayed = [p for name, p in model.named.items() if not name.endswith("2")]
    others = [p for name, p in model.named.items() if name.endswith("2")]
    optimizer = AdamOptimizer(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5}], lr=0.25
    )
    optimizer.step()
    assert log == [
        "first last",
        *("a0 a1", "a2", "a changed"),
        *("b0 b1", "b2", "b changed"),
        *("c0 c1", "c2", "c changed"),
    ]
    # Every group with its own settings.
    assert torch.allclose(model.named["a0"].detach(), torch.full((4,), 0.75))
    assert torch.allclose(model.named["a2"].detach(), torch.full((3,), 0.5))


def test_plan_follows_gradients_that_come_and_go(watched: Any) -> None:
    log: list[Any] = []
    model = Model(log)
    watched(model, log)
    optimizer = AdamOptimizer(model.named.values())
    optimizer.step()
    for name in ("a0", "a1", "a2", "b1", "first"):
        model.named[name].grad = None
    log.clear()
    optimizer.step()
    assert log == ["b0 b2", "b changed", "c0 c1 c2", "c changed", "last"]
    model.give_gradients()
    log.clear()
    optimizer.step()
    # What has taken another number of steps needs a call of its own.
    assert log == [
        "first",
        "last",
        "a0 a1 a2",
        "a changed",
        "b0 b2",
        "b1",
        "b changed",
        "c0 c1 c2",
        "c changed",
    ]
    assert {name: optimizer.state[p]["step"] for name, p in model.named.items()} == {
        **dict.fromkeys(("first", "a0", "a1", "a2", "b1"), 2),
        **dict.fromkeys(("b0", "b2", "c0", "c1", "c2", "last"), 3),
    }


def test_plan_is_kept_while_only_numbers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = update_plan._make
    monkeypatch.setattr(update_plan, "_make", lambda *args: made.append(args) or make(*args))
    model = Model([])
    optimizer = AdamOptimizer(model.named.values(), lr=0.25)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.25 / (1 + step)
        model.give_gradients()
        optimizer.step()
    assert len(made) == 1
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    moved: Any = model.named["a0"]
    moved.owner_reference = weakref.ref(model.shards["b"])
    optimizer.step()
    assert len(made) == 4


def test_state_replaced_by_hand_is_used() -> None:
    p, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = AdamOptimizer([p]), AdamOptimizer([twin])
    for step in range(4):
        p.grad, twin.grad = torch.full((3,), step + 1.0), torch.full((3,), step + 1.0)
        one.step()
        other.step()
        if step == 1:
            one.state[p] = {key: copy.deepcopy(value) for key, value in one.state[p].items()}
            one.state[p]["exp_avg"] = one.state[p]["exp_avg"].clone()
            one.state[p]["step"] = torch.tensor(2.0)
    assert torch.equal(p, twin) and one.state[p]["step"] == 4


def test_a_count_of_steps_set_by_hand_is_used() -> None:
    trained = []
    for kind in (AdamOptimizer, torch.optim.Adam):
        ps = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = kind(ps, lr=0.1)  # type: ignore[operator]
        for step in range(4):
            for number, p in enumerate(ps):
                p.grad = torch.full((3,), step + number + 1.0)
            optimizer.step()
            if step == 1:  # the moments of the second begin anew
                state = optimizer.state[ps[1]]
                state["step"] = state["step"] * 0
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        trained.append(ps)
    assert all(torch.equal(p, twin) for p, twin in zip(*trained, strict=True))


def test_an_owner_that_is_gone_is_not_told() -> None:
    log: list[Any] = []
    model = Model(log)
    optimizer = AdamOptimizer(model.named.values())
    optimizer.step()
    log.clear()
    del model.shards["b"]
    optimizer.step()
    assert log == ["a changed", "c changed"]


def test_an_owner_that_went_before_the_first_step_is_none() -> None:
    log: list[Any] = []
    model = Model(log)
    optimizer = AdamOptimizer(model.named.values())
    del model.shards["a"]
    optimizer.step()
    assert log == ["b changed", "c changed"] and all(
        bool((p < 1).all()) for p in model.named.values()
    )


def test_owners_keep_all_that_overlapping_updates_read() -> None:
    kept: dict[str, Any] = {}

    class Keeping(Shard):
        def note_update(self, done: Any = None, reads: object = None) -> None:
            kept[self.name] = reads

    shard = Keeping("a", [])
    params = [owned(torch.ones(2), shard) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamOptimizer(
        [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}], overlap_forward=True
    )
    optimizer.step()
    grads, _, _ = kept["a"]
    assert [id(grad) for part in grads for grad in part] == [id(p.grad) for p in params]


def calls_of_a_step(number: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the Python functions called in a step that updates ``number`` parameters of one owner,
    kernels apart.
    """

    class NoKernels:
        @staticmethod
        def adam_step(*columns: Any, **options: Any) -> None:
            pass

    monkeypatch.setattr("bmt_optim.adam.optimizer.kernels_on", lambda device: NoKernels)
    shard = Shard("a", [])
    params = [owned(torch.ones(1), shard) for _ in range(number)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamOptimizer(params)
    optimizer.step()
    calls: list[str] = []

    def count(frame: Any, event: str, _: object) -> None:
        # Of ours only: a garbage collection may call anything in between.
        if event == "call" and frame.f_globals.get("__name__", "").startswith("bmt_"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_step_calls_no_function_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of_a_step(400, monkeypatch) == calls_of_a_step(4, monkeypatch)
