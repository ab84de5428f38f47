"""States of ``OptimManager`` and its optimizers: resuming bit for bit on the same ranks, and states
of other makers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from managed_training import OPTIMIZERS, Training, assert_same, through_file
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.errors import CheckpointError
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_testing import on_ranks
from cells import cells


@on_ranks(4)
@cells("kind", OPTIMIZERS)
@cells("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_resumes_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    training = Training(kind, dtype)
    training.run(range(6))
    state, values = through_file(training.manager.state_dict()), training.wholes()
    training.run(range(6, 9))
    resumed = Training(kind, dtype, is_new=True)
    resumed.set_wholes(values)
    resumed.manager.load_state_dict(state)
    resumed.run(range(6, 9))
    assert_same(resumed.result(), training.result())
    assert training.manager.loss_scale > 256 and training.manager.steps_since_last_scale > 0


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("is_half", [False, True])
def test_torchs_optimizer_steps_half_parameters_with_float32_moments_that_it_loaded(
    is_half: bool, gathered: bool
) -> None:
    # Of a float32 training, or of one with masters.
    first = torch.ones(3, dtype=torch.bfloat16 if is_half else torch.float32)
    parameters = [torch.nn.Parameter(first), torch.nn.Parameter(torch.ones(3).bfloat16())]
    managers = [OptimManager(), OptimManager()]
    for p, manager, masters in zip(parameters, managers, (True, False), strict=True):
        p.grad = torch.full_like(p, 0.3)
        manager.add_optimizer(torch.optim.AdamW([p], lr=0.1), masters=masters)
    managers[0].step()
    state = through_file(managers[0].state_dict(gather_opt=gathered))
    managers[1].load_state_dict(state)
    managers[1].step()
    plain = torch.optim.AdamW([q := torch.nn.Parameter(torch.ones(3).bfloat16())], lr=0.1)
    plain.load_state_dict(managers[0].optimizers[0].state_dict())
    q.grad = torch.full_like(q, 0.3)
    plain.step()
    assert torch.equal(parameters[1], q)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_moments_of_a_half_parameter_go_on_in_float32_with_it(kind: str, gathered: bool) -> None:
    first, resumed = Training(kind, torch.bfloat16), Training(kind, torch.float32)
    first.run(range(2))
    resumed.manager.load_state_dict(first.manager.state_dict(gather_opt=gathered))
    resumed.run(range(2, 3))
    for optimizer in resumed.manager.optimizers:
        for state in optimizer.state.values():
            assert {value.dtype for value in state.values()} == {torch.float32}


def test_a_parameter_that_is_twice_in_a_group_is_saved_once() -> None:
    p, manager = torch.nn.Parameter(torch.zeros(2)), OptimManager()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        manager.add_optimizer(torch.optim.SGD([p, p], lr=0.1, momentum=0.9))
    p.grad = torch.ones(2)
    manager.step()
    state = manager.state_dict(gather_opt=True, named_parameters=[("weight", p)])
    manager.load_state_dict(state, named_parameters=[("weight", p)])
    assert len(manager.optimizers[0].state) == 1


def test_a_state_without_scaling_leaves_scaling_as_it_is() -> None:
    manager, other = OptimManager(), OptimManager(loss_scale=1024, loss_scale_steps=7)
    for each in (manager, other):
        each.add_optimizer(AdamOptimizer([torch.nn.Parameter(torch.zeros(1))]))
    for state in (
        manager.state_dict(),
        {"optimizers": manager.state_dict()["optimizers"], "lr_schedulers": [None]},
    ):
        other.load_state_dict(state)
        assert (
            other.loss_scale_enabled
            and other.loss_scale == 1024
            and other.state_dict()["loss_scale_steps"] == 7
        )


SGD = torch.optim.SGD
FOREIGN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str | None]] = {
    "torch AdamW's to Adam": (torch.optim.AdamW, AdamOptimizer, None),
    "torch Adam's to offloaded": (torch.optim.Adam, AdamOffloadOptimizer, None),
    "offloaded to Adam": (AdamOffloadOptimizer, AdamOptimizer, None),
    "amsgrad to Adam": (
        partial(torch.optim.Adam, amsgrad=True),
        AdamOptimizer,
        "has max_exp_avg_sq",
    ),
    "SGD's to Adam": (
        partial(SGD, momentum=0.9, lr=0.1),
        AdamOptimizer,
        "has no betas but lr, momentum",
    ),
    "SGD's to AdamW": (
        partial(SGD, momentum=0.9, lr=0.1),
        torch.optim.AdamW,
        "has no amsgrad, betas, ",
    ),
    "AdamW's to SGD": (
        torch.optim.AdamW,
        partial(SGD, lr=0.1),
        "has no dampening, momentum, nesterov but amsgrad, ",
    ),
    "Adam's to AdamW": (
        AdamOptimizer,
        torch.optim.AdamW,
        "but hold_steps, overlap_forward: it is another optimizer's",
    ),
}


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FOREIGN)
def test_states_of_other_makers_train_on_or_are_refused(
    case: str, dtype: torch.dtype, is_gathered: bool
) -> None:
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
        rounding = (
            {"rtol": 1e-6, "atol": 0.0} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.0}
        )
        torch.testing.assert_close(step(second, resumed), step(first, saving), **rounding)
    else:
        with pytest.raises(CheckpointError, match=complaint):
            resumed.load_state_dict(state)
        assert not resumed.optimizers[0].state and resumed.optimizers[0].param_groups[0].keys() >= {
            "lr",
            "params",
        }
        step(second, resumed)


def test_a_state_of_bmtrain_loads_into_either_adam() -> None:
    moments = {"exp_avg": torch.full((4,), 0.5).half(), "exp_avg_sq": torch.full((4,), 0.25)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {
        "state": {0: {"step": 3, **moments, "_param_fp32": torch.full((4,), 1.0001)}},
        "param_groups": [group],
    }
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        manager = OptimManager(loss_scale=4)
        manager.add_optimizer(kind([p], hold_steps=1))
        manager.load_state_dict(
            {
                "optimizers": [state],
                "lr_schedulers": [None],
                "loss_scale": 512,
                "loss_scale_enabled": True,
            }
        )
        p.grad = torch.zeros_like(p)
        manager.step()
        assert manager.loss_scale == 512 and manager.optimizers[0].state[p]["step"] == 4
        assert manager.optimizers[0].param_groups[0]["hold_steps"] == 1
        assert p[0].item() == pytest.approx(
            1.0001 - 0.1 * (0.45 / (1 - 0.9**4)) / (0.24975 / (1 - 0.999**4)) ** 0.5, rel=1e-3
        )


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
    assert loaded.dtype == torch.float32 and torch.equal(
        loaded, manager.optimizers[0].state[p]["momentum"]
    )


def test_torchs_adamw_stays_adamw_when_it_loads_a_state_of_adam() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    kinds = torch.optim.Adam, torch.optim.AdamW, torch.optim.AdamW
    managers, optimizers = [OptimManager() for _ in kinds], []
    for p, manager, kind in zip(parameters, managers, kinds, strict=True):
        p.grad = torch.ones(3)
        optimizers.append(kind([p], lr=0.1, weight_decay=0.5))
        manager.add_optimizer(optimizers[-1])
    adam, plain, adamw = optimizers
    adam.step()
    plain.load_state_dict(adam.state_dict())
    managers[2].load_state_dict(managers[0].state_dict(gather_opt=True))
    plain.step()
    adamw.step()
    assert torch.equal(parameters[1], parameters[2])


def rates_of_sequence(steps: int, folder: Path, *, is_resumed: bool) -> list[float]:
    """Return the learning rates of ``steps`` steps, before which a checkpoint is saved, or
    loaded.
    """
    model = torch.nn.Linear(2, 2)
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.1), OptimManager()
    schedulers: list[Any] = [LinearLR(optimizer, total_iters=3), MultiStepLR(optimizer, [2, 4, 4])]
    manager.add_optimizer(optimizer, SequentialLR(optimizer, schedulers, milestones=[3]))
    if is_resumed:
        load_checkpoint(folder, model, manager)
    else:
        save_checkpoint(folder, model, manager)
    found = []
    for _ in range(steps):
        manager.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's own call
def test_a_sequence_of_torchs_schedulers_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = rates_of_sequence(9, tmp_path, is_resumed=False)
    assert rates_of_sequence(9, tmp_path, is_resumed=True) == expected


@on_ranks(2)
def test_a_checkpoint_of_a_manager_without_optimizers_warns() -> None:
    with pytest.warns(UserWarning, match=r"has no optimizer.*add_optimizer\(optimizer\) before"):
        state = OptimManager().logical_state()
    assert state["logical"]
