"""States of ``OptimManager``: resuming bit for bit on the same ranks, and at any other world size."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.errors import CheckpointError
from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_core.run.topology import Topology
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, gather_state, scatter_state
from bmt_optim.lr_scheduler import Exponential

SHAPES = {"weight": (3, 5), "bias": (5,), "scalar": (), "one": (1,), "tiny": (2,), "plain": (2, 3)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bmt": lambda params: AdamOptimizer(params, lr=0.05, weight_decay=0.1, compact_master=False),
    "bmt_compact": lambda params: AdamOptimizer(params, lr=0.05, weight_decay=0.1, compact_master=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


class Training:
    """Parameters (sharded but for ``plain``), two optimizers, one with and one without a scheduler."""

    def __init__(self, kind: str, dtype: torch.dtype, *, is_new: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params: dict[str, torch.nn.Parameter] = {}
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            is_plain = name == "plain" or not runtime.is_initialized()
            self.params[name] = torch.nn.Parameter(value) if is_plain else DistributedParameter(value)
        named = list(self.params.items())
        first, second = (OPTIMIZERS[kind]([p for _, p in part]) for part in (named[:3], named[3:]))
        self.schedule = Exponential(first, 0.05, 0, 10, gamma=0.5 if is_new else 0.8)
        self.manager = OptimManager(
            loss_scale=4.0 if is_new else 256.0, loss_scale_steps=4, min_loss_scale=2 if is_new else 1
        )
        self.manager.add_optimizer(first, self.schedule)
        self.manager.add_optimizer(second)

    def run(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 + step)
            self.manager.zero_grad()
            for p in self.params.values():
                is_shard = isinstance(p, DistributedParameter)
                whole = torch.randn(p.full_shape if is_shard else p.shape, generator=generator).to(p.dtype)
                p.grad = p.local_part(whole).clone() if is_shard else whole / runtime.world_size()
                p.grad *= self.manager.loss_scale
            self.manager.step()

    def wholes(self) -> dict[str, torch.Tensor]:
        return {
            name: (p.gather_like(p.detach()) if isinstance(p, DistributedParameter) else p.detach()).clone()
            for name, p in self.params.items()
        }

    def set_wholes(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(p.local_part(values[name]) if isinstance(p, DistributedParameter) else values[name])

    def module(self) -> DistributedModule:
        module = DistributedModule()
        for name, p in self.params.items():
            module.register_parameter(name, p)
        return module

    def summary(self) -> tuple[Any, ...]:
        manager = self.manager
        return (manager.loss_scale, manager.steps_since_last_scale, self.schedule.num_iter, self.schedule.current_lr)


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


Result = tuple[dict[str, torch.Tensor], tuple[Any, ...]]


def same(one: Result, other: Result) -> bool:
    return one[1] == other[1] and all(torch.equal(value, other[0][name]) for name, value in one[0].items())


# The same ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_resumes_bit_for_bit(run_ranks: Any, world_size: int, kind: str, dtype: torch.dtype) -> None:
    for straight, resumed in run_ranks(_resume, world_size, kind, dtype):
        assert same(straight, resumed)
        assert straight[1][0] > 256 and straight[1][1] > 0


def _resume(kind: str, dtype: torch.dtype) -> tuple[Result, Result]:
    training = Training(kind, dtype)
    training.run(range(6))
    state, values = through_file(training.manager.state_dict()), training.wholes()
    training.run(range(6, 9))
    resumed = Training(kind, dtype, is_new=True)
    resumed.set_wholes(values)
    resumed.manager.load_state_dict(state)
    resumed.run(range(6, 9))
    return (training.wholes(), training.summary()), (resumed.wholes(), resumed.summary())


def test_state_holds_every_setting_of_the_scale() -> None:
    manager = OptimManager(64, 3, 7, 2, 1000)
    manager.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    other = OptimManager()
    other.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    other.load_state_dict(manager.state_dict())
    assert other.state_dict() == manager.state_dict()
    assert other.loss_scale_enabled and other.loss_scale == 64 and other.lr_schedulers == [None]


def test_a_state_without_scaling_leaves_scaling_as_it_is() -> None:
    manager, other = OptimManager(), OptimManager(loss_scale=1024, loss_scale_steps=7)
    for each in (manager, other):
        each.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    for state in (manager.state_dict(), {"optimizers": manager.state_dict()["optimizers"], "lr_schedulers": [None]}):
        other.load_state_dict(state)
        assert other.loss_scale_enabled and other.loss_scale == 1024 and other.state_dict()["loss_scale_steps"] == 7


@pytest.mark.parametrize("value", [float("nan"), -1.0, None, "high"])
def test_a_loss_scale_that_is_none_is_noticed_before_anything_changes(value: Any) -> None:
    training, other = (Training("bmt", torch.float32) for _ in range(2))
    training.run(range(2))
    for state in (training.manager.state_dict(), training.manager.state_dict(gather_opt=True)):
        before = other.summary()
        with pytest.raises(CheckpointError, match="The state has no loss scale that can be used: "):
            other.manager.load_state_dict({**state, "loss_scale": value})
        assert other.summary() == before and not any(optimizer.state for optimizer in other.manager.optimizers)
    with pytest.raises(CheckpointError, match="The state has no loss scale that can be used: "):
        other.manager.check_logical_state(None, {**training.manager.state_dict(gather_opt=True), "loss_scale": value})


SGD = torch.optim.SGD
FOREIGN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str | None]] = {
    "torch AdamW's to Adam": (torch.optim.AdamW, AdamOptimizer, None),
    "torch Adam's to offloaded": (torch.optim.Adam, AdamOffloadOptimizer, None),
    "offloaded to Adam": (AdamOffloadOptimizer, AdamOptimizer, None),
    "amsgrad to Adam": (partial(torch.optim.Adam, amsgrad=True), AdamOptimizer, "has max_exp_avg_sq"),
    "SGD's to Adam": (partial(SGD, momentum=0.9, lr=0.1), AdamOptimizer, "has no betas but lr, momentum"),
    "SGD's to AdamW": (partial(SGD, momentum=0.9, lr=0.1), torch.optim.AdamW, "has no amsgrad, betas, "),
    "AdamW's to SGD": (torch.optim.AdamW, partial(SGD, lr=0.1), "has no dampening, momentum, nesterov but amsgrad, "),
    "Adam's to AdamW": (AdamOptimizer, torch.optim.AdamW, "but hold_steps, overlap_forward: it is another optimizer's"),
}


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FOREIGN)
def test_states_of_other_makers_train_on_or_are_refused(case: str, dtype: torch.dtype, is_gathered: bool) -> None:
    made, loading, complaint = FOREIGN[case]

    def manager_of(kind: Callable[[Any], Any]) -> tuple[torch.nn.Parameter, OptimManager]:
        p, manager = torch.nn.Parameter(torch.ones(3, dtype=dtype)), OptimManager()
        manager.add_optimizer(kind([p]))
        return p, manager

    def step(p: torch.nn.Parameter, manager: OptimManager) -> torch.Tensor:
        p.grad = torch.tensor([1.0, -1.0, 0.5], dtype=dtype)
        manager.step()
        return p.detach()

    (first, saving), (second, resumed) = manager_of(made), manager_of(loading)
    second.data.copy_(step(first, saving))
    state = saving.state_dict(gather_opt=is_gathered)
    if complaint is None:
        resumed.load_state_dict(state)
        rounding = {"rtol": 1e-6, "atol": 0.0} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.0}
        torch.testing.assert_close(step(second, resumed), step(first, saving), **rounding)
    else:
        with pytest.raises(CheckpointError, match=complaint):
            resumed.load_state_dict(state)
        assert not resumed.optimizers[0].state and resumed.optimizers[0].param_groups[0].keys() >= {"lr", "params"}
        step(second, resumed)


def test_a_state_of_bmtrain_loads_into_either_adam() -> None:
    moments = {"exp_avg": torch.full((4,), 0.5).half(), "exp_avg_sq": torch.full((4,), 0.25)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {"state": {0: {"step": 3, **moments, "_param_fp32": torch.full((4,), 1.0001)}}, "param_groups": [group]}
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        manager = OptimManager(loss_scale=4)
        manager.add_optimizer(kind([p], hold_steps=1))
        manager.load_state_dict(
            {"optimizers": [state], "lr_schedulers": [None], "loss_scale": 512, "loss_scale_enabled": True}
        )
        p.grad = torch.zeros_like(p)
        manager.step()
        assert manager.loss_scale == 512 and manager.optimizers[0].state[p]["step"] == 4
        assert manager.optimizers[0].param_groups[0]["hold_steps"] == 1
        assert p[0].item() == pytest.approx(
            1.0001 - 0.1 * (0.45 / (1 - 0.9**4)) / (0.24975 / (1 - 0.999**4)) ** 0.5, rel=1e-3
        )


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"), [("bmt", (3, 4)), ("bmt", (1,)), ("bmt", ()), ("momentum", (3, 4)), ("momentum", (1,))]
)
def test_a_state_of_a_parameter_of_another_shape_is_refused(
    run_ranks: Any, is_distributed: bool, kind: str, shape: tuple[int, ...]
) -> None:
    for messages in run_ranks(_state_of_other_shape, 2, shape, is_distributed, kind):
        assert f"is of a parameter of shape {shape or (1,)}, and here it has (5, 3)." in messages[0]
        assert "of parameter 0 has " in messages[1] and "and the parameter here has (" in messages[1]


def _state_of_other_shape(shape: tuple[int, ...], is_distributed: bool, kind: str) -> list[str]:
    def manager_of(shape: tuple[int, ...]) -> OptimManager:
        value, manager = torch.ones(shape), OptimManager()
        p = DistributedParameter(value) if is_distributed else torch.nn.Parameter(value)
        manager.add_optimizer(OPTIMIZERS[kind]([("p", p)]))
        p.grad = torch.ones_like(p)
        manager.step()
        return manager

    saved, here = manager_of(shape), manager_of((5, 3))
    before = through_file(here.state_dict())
    raw = {"optimizers": saved.state_dict()["optimizers"], "lr_schedulers": [None]}  # as of another maker
    messages = []
    for state in (saved.state_dict(gather_opt=True), raw):
        with pytest.raises(CheckpointError) as caught:
            here.load_state_dict(state)
        messages.append(str(caught.value))
    now = here.state_dict()["optimizers"][0]["state"][0]
    assert all(
        torch.equal(torch.as_tensor(now[k]), torch.as_tensor(v)) for k, v in before["optimizers"][0]["state"][0].items()
    )
    return messages


def test_loading_leaves_the_saved_state_alone() -> None:
    training = Training("adamw", torch.float32)
    training.run(range(2))
    state = training.manager.state_dict()
    before = state["optimizers"][0]["state"][0]["exp_avg"].clone()
    other = Training("adamw", torch.float32)
    other.manager.load_state_dict(state)
    other.run(range(2, 4))
    assert torch.equal(state["optimizers"][0]["state"][0]["exp_avg"], before)


def test_float32_state_of_any_optimizer_for_half_parameters_survives() -> None:
    class Momentum32(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros(p.shape))
                momentum.mul_(0.9).add_(p.grad.float(), alpha=0.123)

    def manager_of() -> OptimManager:
        manager = OptimManager()
        manager.add_optimizer(Momentum32([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]))
        return manager

    manager, other = manager_of(), manager_of()
    p = manager.optimizers[0].param_groups[0]["params"][0]
    p.grad = torch.randn(3).bfloat16()
    manager.step()
    other.load_state_dict(manager.state_dict())
    loaded = other.optimizers[0].state[other.optimizers[0].param_groups[0]["params"][0]]["momentum"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, manager.optimizers[0].state[p]["momentum"])


def test_a_state_of_another_world_size_is_refused_on_every_rank(run_ranks: Any) -> None:
    saved = run_ranks(_rank_state, 4)
    expected = (
        "The optimizer state was saved by one of 4 ranks, and this run has 2. Save with state_dict(gather_opt=True)"
    )
    for message in run_ranks(_load_error, 2, saved):
        assert message.startswith(expected)


def test_a_state_of_another_rank_is_refused_on_every_rank(run_ranks: Any) -> None:
    saved = run_ranks(_rank_state, 2)
    messages = run_ranks(_load_error, 2, [saved[0], saved[0]])
    assert messages[1] == "The optimizer state is that of rank 0, and this is rank 1."
    assert messages[0] == f"Rank 1 failed in OptimManager.load_state_dict: {messages[1]}"


def _rank_state() -> Any:
    training = Training("bmt", torch.float32)
    training.run(range(2))
    return through_file(training.manager.state_dict())


def _load_error(states: list[Any]) -> str:
    training = Training("bmt", torch.float32)
    before = training.summary()
    with pytest.raises(CheckpointError) as caught:
        training.manager.load_state_dict(states[runtime.rank()])
    assert training.summary() == before and not training.manager.optimizers[0].state
    return str(caught.value)


def test_a_state_of_other_optimizers_or_parameters_is_refused() -> None:
    training = Training("bmt", torch.float32)
    training.run(range(1))
    state = training.manager.state_dict()
    fewer = OptimManager()
    fewer.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    with pytest.raises(
        CheckpointError, match="The state is of 2 optimizers, 1 with a scheduler; this manager has 1, 0"
    ):
        fewer.load_state_dict(state)
    other = OptimManager()
    first = AdamOptimizer([torch.nn.Parameter(torch.zeros(3)) for _ in range(3)])
    other.add_optimizer(first, Exponential(first, 1.0, 0, 10))
    other.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]))
    with pytest.raises(CheckpointError, match="The state of optimizer 0 is of parameters of other shapes"):
        other.load_state_dict(state)
    assert not first.state and other.loss_scale == 1


# Any world size


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(("kind", "dtype"), [("bmt", torch.bfloat16), ("bmt", torch.float32), ("adamw", torch.float32)])
def test_gathered_state_resumes_at_any_world_size(
    run_ranks: Any, before: int, after: int, kind: str, dtype: torch.dtype
) -> None:
    saved = run_ranks(_train_and_gather, before, kind, dtype)
    values, state, expected = saved[0]
    assert all(not rank_saved[1]["logical"]["parameters"] for rank_saved in saved[1:])
    for is_on_all_ranks in (True, False):
        for resumed in run_ranks(_resume_gathered, after, kind, dtype, values, state, is_on_all_ranks):
            assert same(resumed, expected)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize(
    ("kind", "then"), [("bmt_compact", "bmt"), ("bmt", "bmt_compact"), ("bmt_compact", "bmt_compact")]
)
def test_gathered_state_resumes_with_the_other_kind_of_master(
    run_ranks: Any, before: int, after: int, kind: str, then: str
) -> None:
    plain_torch = {"BMT_KERNELS": "reference"}  # what ``straight``, which is outside of a run, computes with
    saved = run_ranks(_train_and_gather, before, kind, torch.bfloat16, env=plain_torch)
    values, state, expected = saved[0]
    straight = Training("bmt", torch.bfloat16)  # one process, whole masters
    straight.run(range(6))
    for name, entry in state["logical"]["parameters"].items():
        place = straight.params[name]
        own = next(o.state[place] for o in straight.manager.optimizers if place in o.state)
        assert "_param_remainder" not in entry
        assert torch.equal(entry["_param_fp32"], own["_param_fp32"].reshape(entry["_param_fp32"].shape))
    for resumed in run_ranks(_resume_gathered, after, then, torch.bfloat16, values, state, True, env=plain_torch):
        assert same(resumed, expected)


def _train_and_gather(kind: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any, Result]:
    training = Training(kind, dtype)
    training.run(range(6))
    state = through_file(training.manager.state_dict(gather_opt=True, named_parameters=training.params.items()))
    values = training.wholes()
    training.run(range(6, 9))
    return values, state, (training.wholes(), training.summary())


def _resume_gathered(
    kind: str, dtype: torch.dtype, values: dict[str, torch.Tensor], state: Any, is_on_all_ranks: bool
) -> Result:
    training = Training(kind, dtype, is_new=True)
    training.run(range(1))  # what was there before is replaced
    training.set_wholes(values)
    if runtime.rank() and not is_on_all_ranks:
        state["logical"]["parameters"] = {}
    training.manager.load_state_dict(state, named_parameters=training.params.items())
    training.run(range(6, 9))
    return training.wholes(), training.summary()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathered_state_is_whole_tensors_by_name_on_rank_0(run_ranks: Any, world_size: int) -> None:
    results = run_ranks(_gathered, world_size)
    assert results[1:] == [{}] * (world_size - 1)
    reference = _gathered()
    assert set(results[0]) == set(SHAPES)
    for name, entry in results[0].items():
        assert entry["step"] == 3
        assert entry["exp_avg"].shape == entry["_param_fp32"].shape == (SHAPES[name] or (1,))
        torch.testing.assert_close(
            entry["exp_avg"].reshape(SHAPES[name]), reference[name]["exp_avg"].reshape(SHAPES[name])
        )


def _gathered() -> Any:
    training = Training("bmt", torch.bfloat16)
    training.run(range(3))
    return gather_state(training.manager, training.params)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_resume_at_any_world_size(
    run_ranks: Any, tmp_path: Path, before: int, after: int, dtype: torch.dtype
) -> None:
    expected = run_ranks(_train_and_save, before, str(tmp_path), dtype)[0]
    for resumed in run_ranks(_resume_checkpoint, after, str(tmp_path), dtype):
        assert same(resumed, expected)


def _train_and_save(path: str, dtype: torch.dtype) -> Result:
    training = Training("bmt", dtype)
    training.run(range(6))
    save_checkpoint(path, training.module(), training.manager, step=6)
    training.run(range(6, 9))
    return training.wholes(), training.summary()


def _resume_checkpoint(path: str, dtype: torch.dtype) -> Result:
    training = Training("bmt", dtype, is_new=True)
    assert load_checkpoint(path, training.module(), training.manager)["step"] == 6
    training.run(range(6, 9))
    return training.wholes(), training.summary()


def test_names_come_from_the_optimizer_or_the_place_when_none_are_given() -> None:
    model = torch.nn.Linear(2, 2)
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.named_parameters()))
    manager.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    assert set(gather_state(manager)) == {"weight", "bias", "1.0.0"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_options_of_groups_follow_the_names_of_their_parameters(run_ranks: Any, world_size: int) -> None:
    for options, message in run_ranks(_swapped_groups, world_size):
        assert options == {"weight": 0.1, "bias": 0.0, "one": 0.3}
        assert "Group 0 of optimizer 0 has the parameters [weight, bias], and the state has no such group." in message


def _swapped_groups() -> tuple[dict[str, float], str]:
    params = {name: DistributedParameter(torch.ones(SHAPES[name])) for name in ("weight", "bias", "one")}

    def manager_of(**groups: float) -> OptimManager:
        manager = OptimManager()
        named = [
            {"params": [params[n] for n in names.split("_")], "weight_decay": decay} for names, decay in groups.items()
        ]
        manager.add_optimizer(AdamOptimizer(named, lr=0.1))
        return manager

    state = manager_of(weight=0.1, bias=0.0, one=0.3).state_dict(gather_opt=True, named_parameters=params)
    swapped = manager_of(one=0.0, weight=0.0, bias=0.1)
    swapped.load_state_dict(state, named_parameters=params)
    names = {p: name for name, p in params.items()}
    options = {names[g["params"][0]]: g["weight_decay"] for g in swapped.optimizers[0].param_groups}
    other = manager_of(weight_bias=0.5, one=0.0)
    with pytest.raises(CheckpointError) as caught:
        other.load_state_dict(state, named_parameters=params)
    assert [g["weight_decay"] for g in other.optimizers[0].param_groups] == [0.5, 0.0]
    return options, str(caught.value)


class WithStatistics(torch.optim.SGD):
    """Keeps a statistic of what it believes to be the whole gradient."""

    def __init__(self, params: Any, statistic: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.statistic = statistic

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["statistic"] = self.statistic(p.grad)


@pytest.mark.parametrize("is_number", [True, False])
def test_what_each_rank_computed_of_its_shard_is_kept_per_rank_and_not_gathered(
    run_ranks: Any, is_number: bool
) -> None:
    for rank, (message, statistic) in enumerate(run_ranks(_statistics_of_shards, 2, is_number)):
        reason = "differs between ranks" if is_number else "has shape (2,), not that of a rank's shard"
        assert message.startswith(f"statistic of 'weight' {reason}")
        assert statistic.tolist() == ([7.0, 15.0][rank] if is_number else [[0.0, 7.0], [8.0, 15.0]][rank])


def _statistics_of_shards(is_number: bool) -> tuple[str, torch.Tensor]:
    weight = DistributedParameter(torch.ones(4, 4))
    optimizer = WithStatistics([weight], torch.max if is_number else lambda grad: torch.stack(torch.aminmax(grad)))
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    weight.grad = weight.local_part(torch.arange(16.0).view(4, 4)).clone()
    manager.step()
    with pytest.raises(CheckpointError) as caught:
        manager.logical_state([("weight", weight)])
    saved = through_file(manager.state_dict())
    optimizer.state.clear()
    manager.load_state_dict(saved)
    return str(caught.value), optimizer.state[weight]["statistic"]


def test_gathered_state_that_does_not_fit_is_refused_on_every_rank(run_ranks: Any) -> None:
    for missing, shape, nothing, unnamed, is_unchanged in run_ranks(_bad_gathered, 2):
        assert "The optimizer state has nothing about 1 of 6 parameters, the first is 'bias'." in missing
        assert "The state of 'weight' has exp_avg of shape (5, 3), and the parameter here has (3, 5)." in shape
        assert "Rank 0 was given no optimizer state." in nothing
        assert "of optimizer 0, of shape" in unnamed and "is not among the named parameters" in unnamed
        assert is_unchanged


def _bad_gathered() -> tuple[str, str, str, str, bool]:
    training = Training("bmt", torch.float32)
    training.run(range(1))
    # Rank 0 alone has the contents, and so it alone spoils them.
    first, second = (gather_state(training.manager, training.params) for _ in range(2))
    if runtime.rank() == 0:
        del first["bias"]
        second["weight"]["exp_avg"] = second["weight"]["exp_avg"].t().contiguous()
    before = training.manager.optimizers[0].state[training.params["weight"]]["exp_avg"].clone()
    messages = []
    for state in (first, second, {}):
        with pytest.raises(CheckpointError) as caught:
            scatter_state(training.manager, training.params, state)
        messages.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        gather_state(training.manager, {"weight": training.params["weight"]})
    now = training.manager.optimizers[0].state[training.params["weight"]]["exp_avg"]
    return messages[0], messages[1], messages[2], str(caught.value), torch.equal(before, now)


def test_tensor_parallel_slices_are_gathered_whole(run_ranks: Any) -> None:
    results = run_ranks(_tensor_parallel, 4)
    whole = torch.arange(24.0).view(4, 6)
    assert torch.equal(results[0][0]["weight"]["exp_avg"], whole)
    for rank, (_, part) in enumerate(results):
        dp, tp = divmod(rank, 2)
        assert torch.equal(part, whole[:, 3 * tp : 3 * tp + 3].reshape(-1)[6 * dp : 6 * dp + 6])


def _tensor_parallel() -> tuple[Any, torch.Tensor]:
    run = runtime.current()
    run.topology = Topology({"data": 2, "tp": 2}, run.rank, run.backend)
    whole = torch.arange(24.0).view(4, 6)
    weight = DistributedParameter(whole.chunk(2, dim=1)[run.topology.axis_rank("tp")], tp_mode=True, tp_split_dim=1)
    manager = OptimManager()
    optimizer = AdamOptimizer([weight])
    manager.add_optimizer(optimizer)
    optimizer.state[weight] = {"step": 1, "exp_avg": weight.detach().clone(), "exp_avg_sq": weight.detach().clone()}
    state = gather_state(manager, {"weight": weight})
    optimizer.state.clear()
    scatter_state(manager, {"weight": weight}, state)
    return state, optimizer.state[weight]["exp_avg"]
