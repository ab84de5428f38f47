"""Gathered states of ``OptimManager``: whole tensors by name, which resume at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from managed_training import SHAPES, Training, assert_same, through_file

from bmt_core.errors import CheckpointError
from bmt_core.run import runtime
from bmt_core.run.topology import Topology
from bmt_optim import AdamOptimizer, OptimManager, gather_state, scatter_state
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, run_ranks
from cells import cells

KINDS = [("bmt", torch.bfloat16), ("bmt", torch.float32), ("adamw", torch.float32)]
GRIDS = [(1, 4), (4, 2), (2, 1)]


def train_and_gather(
    kinds: list[tuple[str, torch.dtype]],
) -> list[tuple[dict[str, torch.Tensor], Any, dict[str, Any]]]:
    """Return for each kind the parameters and the state of step 6 and the end of the training."""
    found = []
    for kind, dtype in kinds:
        training = Training(kind, dtype)
        training.run(range(6))
        state = through_file(
            training.manager.state_dict(gather_opt=True, named_parameters=training.params.items())
        )
        values = training.wholes()
        training.run(range(6, 9))
        found.append((values, state, training.result()))
    return found


def resume_gathered(
    kinds: list[tuple[str, torch.dtype]], saved: list[Any], on_all_ranks: list[bool]
) -> list[dict[str, Any]]:
    """Return the ends of the trainings, for each kind and, of these, for each of ``on_all_ranks``:
    whether all ranks have the state that is loaded.
    """
    found = []
    for (kind, dtype), (values, state, _) in zip(kinds, saved, strict=True):
        for is_on_all_ranks in on_all_ranks:
            training = Training(kind, dtype, is_new=True)
            training.run(range(1))  # what was there before is replaced
            training.set_wholes(values)
            if runtime.rank() and not is_on_all_ranks:
                state["logical"]["parameters"] = {}
            training.manager.load_state_dict(state, named_parameters=training.params.items())
            training.run(range(6, 9))
            found.append(training.result())
    return found


@pytest.mark.parametrize(("before", "after"), GRIDS)
def test_gathered_state_resumes_at_any_world_size(before: int, after: int) -> None:
    saved, *others = run_ranks(train_and_gather, before, KINDS)
    assert not any(state["logical"]["parameters"] for kinds in others for _, state, _ in kinds)
    expected = [result for _, _, result in saved for _ in range(2)]
    for resumed in run_ranks(resume_gathered, after, KINDS, saved, [True, False]):
        assert_same(resumed, expected)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_gathered_state_resumes_with_the_other_kind_of_master(before: int, after: int) -> None:
    # What ``straight``, which is outside of a run, computes with.
    plain_torch = {"BMT_KERNELS": "reference"}
    kinds, then = (
        [(kind, torch.bfloat16) for kind in names]
        for names in (["bmt_compact", "bmt", "bmt_compact"], ["bmt", "bmt_compact", "bmt_compact"])
    )
    saved = run_ranks(train_and_gather, before, kinds, env=plain_torch)[0]
    straight = Training("bmt", torch.bfloat16)  # one process, whole masters
    straight.run(range(6))
    for _, state, _ in saved:
        for name, entry in state["logical"]["parameters"].items():
            place = straight.params[name]
            own = next(o.state[place] for o in straight.manager.optimizers if place in o.state)
            assert "_param_remainder" not in entry
            assert torch.equal(
                entry["_param_fp32"], own["_param_fp32"].reshape(entry["_param_fp32"].shape)
            )
    for resumed in run_ranks(resume_gathered, after, then, saved, [True], env=plain_torch):
        assert_same(resumed, [expected for _, _, expected in saved])


def gathered_after_three_steps() -> dict[str, Any]:
    training = Training("bmt", torch.bfloat16)
    training.run(range(3))
    return gather_state(training.manager, training.params)


@on_ranks(4, init=None)
def test_gathered_state_is_whole_tensors_by_name_on_rank_0() -> None:
    reference = gathered_after_three_steps()  # of ordinary parameters
    runtime.init_distributed(device="cpu")
    found = gathered_after_three_steps()
    assert set(found) == (set(SHAPES) if runtime.rank() == 0 else set())
    for name, entry in found.items():
        assert entry["step"] == 3
        assert entry["exp_avg"].shape == entry["_param_fp32"].shape == (SHAPES[name] or (1,))
        torch.testing.assert_close(
            entry["exp_avg"].reshape(SHAPES[name]), reference[name]["exp_avg"].reshape(SHAPES[name])
        )


def test_names_come_from_the_optimizer_or_the_place_when_none_are_given() -> None:
    model = torch.nn.Linear(2, 2)
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.named_parameters()))
    manager.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    assert set(gather_state(manager)) == {"weight", "bias", "1.0.0"}


@on_ranks(2)
def test_options_of_groups_follow_the_names_of_their_parameters() -> None:
    params = {
        name: DistributedParameter(torch.ones(SHAPES[name])) for name in ("weight", "bias", "one")
    }

    def manager_of(**groups: float) -> OptimManager:
        manager = OptimManager()
        named = [
            {"params": [params[n] for n in names.split("_")], "weight_decay": decay}
            for names, decay in groups.items()
        ]
        manager.add_optimizer(AdamOptimizer(named, lr=0.1))
        return manager

    state = manager_of(weight=0.1, bias=0.0, one=0.3).state_dict(
        gather_opt=True, named_parameters=params
    )
    swapped = manager_of(one=0.0, weight=0.0, bias=0.1)
    swapped.load_state_dict(state, named_parameters=params)
    names = {p: name for name, p in params.items()}
    options = {names[g["params"][0]]: g["weight_decay"] for g in swapped.optimizers[0].param_groups}
    assert options == {"weight": 0.1, "bias": 0.0, "one": 0.3}
    other = manager_of(weight_bias=0.5, one=0.0)
    with pytest.raises(
        CheckpointError,
        match=r"Group 0 of optimizer 0 has the parameters \[weight, bias\], and .* no such group\.",
    ):
        other.load_state_dict(state, named_parameters=params)
    assert [g["weight_decay"] for g in other.optimizers[0].param_groups] == [0.5, 0.0]


class WithStatistics(torch.optim.SGD):
    """Keeps a statistic of what it believes to be the whole gradient."""

    def __init__(self, params: Any, statistic: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.statistic = statistic

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["statistic"] = self.statistic(p.grad)


def extremes(gradient: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.aminmax(gradient))


@on_ranks(2)
@cells(
    ("statistic", "of_ranks", "reason"),
    [
        (torch.max, [7.0, 15.0], "differs between ranks"),
        (extremes, [[0.0, 7.0], [8.0, 15.0]], r"has shape \(2,\), not that of a rank's shard"),
    ],
)
def test_what_each_rank_computed_of_its_shard_is_kept_per_rank_and_not_gathered(
    statistic: Callable[[torch.Tensor], torch.Tensor], of_ranks: list[Any], reason: str
) -> None:
    weight = DistributedParameter(torch.ones(4, 4))
    optimizer = WithStatistics([weight], statistic)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    weight.grad = weight.local_part(torch.arange(16.0).view(4, 4)).clone()
    manager.step()
    with pytest.raises(CheckpointError, match=f"^statistic of 'weight' {reason}"):
        manager.logical_state([("weight", weight)])
    saved = through_file(manager.state_dict())
    optimizer.state.clear()
    manager.load_state_dict(saved)
    assert optimizer.state[weight]["statistic"].tolist() == of_ranks[runtime.rank()]


@on_ranks(2)
@cells("value", [math.nan, "warm-up", b"1", None])
def test_a_value_that_is_the_same_on_all_ranks_comes_back(value: Any) -> None:
    weight = DistributedParameter(torch.ones(4, 4))
    optimizer, manager = WithStatistics([weight], lambda _: value), OptimManager()
    manager.add_optimizer(optimizer)
    weight.grad = torch.ones_like(weight)
    manager.step()
    named = [("weight", weight)]
    saved = through_file(manager.state_dict(gather_opt=True, named_parameters=named))
    optimizer.state.clear()
    manager.load_state_dict(saved, named_parameters=named)
    assert repr(optimizer.state[weight]["statistic"]) == repr(value)


@on_ranks(4, own_run=True)
def test_tensor_parallel_slices_are_gathered_whole() -> None:
    run = runtime.current()
    run.topology = Topology({"data": 2, "tp": 2}, run.rank, run.backend)
    whole = torch.arange(24.0).view(4, 6)
    weight = DistributedParameter(
        whole.chunk(2, dim=1)[run.topology.axis_rank("tp")], tp_mode=True, tp_split_dim=1
    )
    manager = OptimManager()
    optimizer = AdamOptimizer([weight])
    manager.add_optimizer(optimizer)
    optimizer.state[weight] = {
        "step": 1,
        "exp_avg": weight.detach().clone(),
        "exp_avg_sq": weight.detach().clone(),
    }
    state = gather_state(manager, {"weight": weight})
    assert run.rank or torch.equal(state["weight"]["exp_avg"], whole)
    optimizer.state.clear()
    scatter_state(manager, {"weight": weight}, state)
    dp, tp = divmod(run.rank, 2)
    part = whole[:, 3 * tp : 3 * tp + 3].reshape(-1)[6 * dp : 6 * dp + 6]
    assert torch.equal(optimizer.state[weight]["exp_avg"], part)
