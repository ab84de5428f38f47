"""What ``OptimManager`` calls of an optimizer of each kind, and an optimizer that provides all of
it itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from managed import KINDS, TakesScale, Unaware, parameter

from bmt_optim import AdamOptimizer, OptimManager, gather_state
from bmt_optim.float32_masters import Float32Masters
from bmt_optim.managed_optimizer import ManagedOptimizer, managed


class Complete(torch.optim.SGD, ManagedOptimizer):
    """Writes down what it is asked."""

    skips_on_device = True

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.asked: list[Any] = []

    def step(
        self, closure: Any = None, *, scale: float = 1, found_inf: torch.Tensor | None = None
    ) -> None:  # type: ignore[override]
        self.asked.append(("step", scale, None if found_inf is None else found_inf.item()))

    def read_outcome(self) -> None:
        self.asked.append("read_outcome")

    def scaling_gradients(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        self.asked.append(("scaling", len(parameters), None if factor is None else factor.item()))
        return nullcontext()

    def portable_state(self, p: torch.nn.Parameter) -> dict[str, Any]:
        return {"asked": len(self.asked)}

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        self.asked = [state["asked"]]

    def note_loaded_options(self) -> None:
        self.loaded_rate = self.param_groups[0]["lr"]


def test_optimizers_that_provide_the_protocol_are_driven_themselves() -> None:
    for optimizer in (AdamOptimizer([parameter()]), Complete([parameter()])):
        assert managed(optimizer) is optimizer


def test_an_optimizer_of_ones_own_is_told_of_scale_flag_and_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bmt_optim.manager._is_on_host", lambda flag: False)  # as on CUDA
    p = parameter(3.0)
    optimizer = Complete([p])
    manager = OptimManager(loss_scale=4.0)
    manager.add_optimizer(optimizer)
    for gradient in (8.0, math.inf):
        p.grad = torch.tensor([gradient])
        manager.clip_grad_norm([p], 1.0)
        manager.step()
    factor = pytest.approx(0.5)
    assert optimizer.asked[:3] == [("scaling", 1, factor), ("scaling", 1, None), ("step", 4.0, 0.0)]
    assert optimizer.asked[3] == "read_outcome"
    assert optimizer.asked[5:] == [("scaling", 1, None), ("step", 4.0, 1.0)]
    assert manager.skipped_steps == 0  # nobody has asked yet
    assert manager.loss_scale == 2.0 and optimizer.asked[-1] == "read_outcome"
    state = gather_state(manager, {"p": p})
    assert state == {"p": {"asked": len(optimizer.asked)}}
    manager.load_state_dict(manager.state_dict(gather_opt=True))
    assert optimizer.asked == [state["p"]["asked"]]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_divided_by_the_scale_once(kind: str) -> None:
    p, twin = parameter(), parameter()
    optimizer, plain = KINDS[kind]([p]), KINDS[kind]([twin])
    p.grad, twin.grad = torch.tensor([8.0, 16.0, -8.0]), torch.tensor([1.0, 2.0, -1.0])
    managed(optimizer).step(scale=8)
    plain.step()
    assert torch.equal(p, twin)


def test_a_step_that_takes_scale_gets_gradients_as_they_are() -> None:
    p = parameter()
    optimizer = TakesScale([p])
    p.grad = torch.full((3,), 16.0)
    managed(optimizer).step(scale=16)
    assert optimizer.scales == [16] and p.grad[0] == 16.0


@pytest.mark.parametrize("scale", [1, 8])
def test_torch_optimizers_that_read_flags_skip_by_themselves_and_are_left_without_flags(
    scale: float,
) -> None:
    p = parameter()
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    adapted = managed(optimizer)
    assert adapted.skips_on_device and not managed(Unaware([p])).skips_on_device
    p.grad = torch.full((3,), math.inf)
    adapted.step(scale=scale, found_inf=torch.ones(()))
    assert torch.equal(p.detach(), torch.tensor([1.0, 2.0, 3.0]))
    p.grad = torch.ones(3)
    adapted.step(scale=scale, found_inf=torch.zeros(()))
    torch.testing.assert_close(p.detach(), torch.tensor([0.9, 1.9, 2.9]))
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


def test_groups_are_those_of_the_optimizer_also_after_it_replaced_them() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.5)
    adapted = managed(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert adapted.param_groups is optimizer.param_groups


def test_an_optimizer_of_ones_own_is_told_when_its_groups_have_the_options_of_a_state() -> None:
    p, twin = parameter(), parameter()
    manager, other = OptimManager(), OptimManager()
    manager.add_optimizer(Complete([p], lr=0.25))
    other.add_optimizer(optimizer := Complete([twin]))
    other.load_state_dict(manager.state_dict(gather_opt=True))
    assert optimizer.loaded_rate == 0.25


def test_optimizers_of_torch_round_moments_and_those_with_masters_do_not() -> None:
    for kind, expected in (("adamw", True), ("momentum", True), ("unaware", False), ("bmt", False)):
        assert managed(KINDS[kind]([parameter()])).rounds_moments is expected, kind
    assert not Float32Masters(torch.optim.AdamW([parameter()])).rounds_moments


@pytest.mark.parametrize("kind", ["adamw", "fused"])
def test_a_portable_state_is_taken_over(kind: str) -> None:
    p, twin = parameter(), parameter()
    one, other = KINDS[kind]([p]), KINDS[kind]([twin])
    p.grad = torch.ones(3)
    one.step()
    state = managed(one).portable_state(p)
    managed(other).load_portable_state(twin, state)
    assert other.state[twin].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(other.state[twin]["exp_avg"], one.state[p]["exp_avg"])
    managed(other).load_portable_state(twin, {})
    assert not other.state
