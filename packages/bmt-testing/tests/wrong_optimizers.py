"""Optimizers that break one rule of the conformance kit each, and a plugin that offers them.

All are momentum SGD but for the mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from wrong_plugins import Named

from bmt_core.plugins.hookspecs import hookimpl
from bmt_optim.managed_optimizer import ManagedOptimizer


class Right(Named, torch.optim.Optimizer):
    """Breaks none."""

    breaks = ""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        p.add_(self.momentum(p, grad), alpha=-group["lr"])

    def momentum(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum: torch.Tensor = state["momentum"]
        return momentum.mul_(0.9).add_(grad)


class KeepsALock(Right):
    """Nothing can be found out: no optimizer like it can be made."""

    breaks = "what_it_needs_to_see_can_be_found_out"

    def __init__(self, params: Any, lr: float = 0.01, *, lock: Any = None) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()


class IgnoresGroups(Right):
    """Steps with the options that it was made with."""

    breaks = "each_group_is_stepped_with_its_own_options"

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        super().update(p, grad, self.defaults)


class AlwaysFloat32(Right):
    """Computes in float32 whatever the parameter is."""

    breaks = "parameters_of_each_type_are_stepped_within_its_rounding"

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        p.copy_(p.float() - group["lr"] * self.momentum(p, grad).float())


class NormOfAPart(Right):
    """Scales its first step by the norm of what this rank has, and says that it is elementwise."""

    breaks = "ranks_train_as_one_process_in_plain_torch"
    bmt_elementwise = True

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        is_first = p not in self.state
        super().update(p, grad / (1 + grad.norm()) if is_first else grad, group)


class AveragesBackwards(Right):
    """Divides a gradient by the number of backward passes that have added to it."""

    breaks = "gradients_of_several_backward_passes_add_up"

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.passes: dict[Any, int] = {}
        for p in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
            p.register_post_accumulate_grad_hook(self.count)

    def count(self, p: torch.Tensor) -> None:
        self.passes[p] = self.passes.get(p, 0) + 1

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        super().update(p, grad / self.passes.pop(p, 1), group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.passes.clear()


class IgnoresScale(Right):
    """Says that it divides by the scale, and does not."""

    breaks = "a_scaled_loss_makes_the_same_steps"

    def step(self, closure: Any = None, scale: float = 1) -> None:  # type: ignore[override]
        super().step()


class _Managed(Right, ManagedOptimizer):
    def step(  # type: ignore[override]
        self, closure: Any = None, *, scale: float = 1, found_inf: torch.Tensor | None = None
    ) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad /= scale
        super().step()

    def portable_state(self, p: torch.nn.Parameter) -> dict[str, Any]:
        return dict(self.state.get(p, {}))

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        self.state[p] = dict(state)


class IgnoresOverflow(_Managed):
    """Says that it skips a step on the device, and does not."""

    breaks = "a_step_with_an_overflow_changes_nothing"
    skips_on_device = True


class UndoesClipping(_Managed):
    """Steps with gradients as they were before the manager scaled them."""

    breaks = "clipped_gradients_make_the_steps"

    def scaling_gradients(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        return self._restored(parameters)

    @contextmanager
    def _restored(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        before = [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
        yield
        for grad, own in before:
            grad.copy_(own)


class NeedsElements(Right):
    """Looks at the largest gradient, which a rank without elements does not have."""

    breaks = "a_rank_that_owns_nothing_takes_part"
    bmt_elementwise = True

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        if grad.abs().max() > 0:
            super().update(p, grad, group)


class MovesFrozen(Right):
    """Lets the momentum of a parameter without a gradient go on."""

    breaks = "parameters_without_gradients_stay_as_they_are"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, torch.zeros_like(p) if p.grad is None else p.grad, group)


def _unchanged(rate: float) -> float:
    return rate


class KeepsAFunction(Right):
    """Has an option that torch.load refuses."""

    breaks = "its_state_goes_through_a_file"

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["rule"] = _unchanged


class ForgetsCompensation(Right):
    """Adds with Kahan's compensation, which is not in its state."""

    breaks = "the_same_number_of_ranks_resumes_in_every_bit"
    bmt_elementwise = True

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.lost: dict[Any, torch.Tensor] = {}

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        lost = self.lost.get(p, torch.zeros_like(p))
        update = -group["lr"] * self.momentum(p, grad) - lost
        before = p.detach().clone()
        p.add_(update)
        self.lost[p] = (p.detach() - before) - update


class KeepsTheLargest(Right):
    """Has in its state what it computed of this rank's part."""

    breaks = "another_number_of_ranks_resumes"
    bmt_elementwise = True

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        super().update(p, grad, group)
        if grad.numel():
            self.state[p]["largest"] = grad.abs().max()


class NeedsAClosure(Right):
    """Computes gradients by a closure only, which its signature does not say."""

    breaks = "it_steps_without_a_closure"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        super().step()


class Lbfgs(Named, torch.optim.LBFGS):
    """Its signature says so."""

    breaks = "it_steps_without_a_closure"


class Muon(Named, torch.optim.Muon):
    """Takes matrices only, and needs them whole. Breaks none."""

    breaks = ""


WRONG = [*Right.plugins, Lbfgs, Muon]


@hookimpl
def bmt_optimizers() -> list[type[torch.optim.Optimizer]]:
    return WRONG
