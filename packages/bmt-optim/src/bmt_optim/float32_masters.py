"""``Float32Masters``: lets an elementwise optimizer step float32 copies of parameters of
half types.

A step of 1e-4 to a weight of 1 is lost in bfloat16, whose next number below is 0.996. So the
optimizer steps a float32 copy, the master, and the weight is the master, rounded. ``AdamOptimizer``
keeps masters by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.run.runtime import rank
from bmt_core.torch_internals import Seen
from bmt_core.user_warnings import warn_user
from bmt_optim.adam.parameter_state import MASTER, followed_master
from bmt_optim.managed_optimizer import ManagedOptimizer, PlainOptimizer, widened
from bmt_params.gradient_sum import float32_sum_of
from bmt_params.owner import owner_of

HALF_TYPES = (torch.float16, torch.bfloat16)


class Float32Masters(PlainOptimizer):
    """Steps ``optimizer`` with a float32 master in place of each parameter of a half type that has
    a gradient.

    A master has the shape of this rank's part (1-D if the parameter is sharded). It is made at the
    parameter's first step, and is part of its state, under the key ``"_param_fp32"``. Inside of a
    step, the optimizer's groups and states have the masters; outside of it they have the
    parameters, as without masters. If a parameter was written between steps (``bmt.load``, an
    in-place operation), its master takes the new value. A step needs memory for the gradients
    in float32.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.rounds_moments = False
        # By parameter, the object that the optimizer steps.
        self._masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._stepped = Seen()  # the parameters, after the step

    @torch.no_grad()
    def step(self, *, scale: float = 1, found_inf: torch.Tensor | None = None) -> object:
        with self._masters_in_place(1 / scale) as masters:
            result = self._optimizer.step()
        if masters:
            torch._foreach_copy_(list(masters), list(masters.values()))
        self._masters.update(masters)
        self._stepped.note(masters)
        for owner in {owner_of(p) for p in masters}:
            if owner is not None:  # the next gathers wait for this point, and for no later one
                owner.note_update()
        return result

    @contextmanager
    def _masters_in_place(
        self, factor: float
    ) -> Iterator[dict[torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield the masters by parameter. Inside, the groups and states have them, with gradients
        in float32 times ``factor``.
        """
        state = self._optimizer.state
        before = [group["params"] for group in self.param_groups]
        parameters = [p for params in before for p in params if p.grad is not None]
        masters = {p: self._master_of(p) for p in parameters if p.dtype in HALF_TYPES}
        try:
            for p, master in masters.items():
                total = float32_sum_of(p.grad)
                master.grad = p.grad.to(torch.float32) if total is None else total.clone()
            grads = [masters.get(p, p).grad for p in parameters]
            if factor != 1 and grads:
                torch._foreach_mul_(grads, factor)
            for p, master in masters.items():
                values = dict(state.get(p, {}))
                if values.pop(MASTER, None) is None:  # of steps without masters
                    values = {key: widened(value, master) for key, value in values.items()}
                state.pop(p, None)
                if values:
                    state[master] = values
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"] = [masters.get(p, p) for p in params]
            yield masters
        finally:
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"] = params
            for p, master in masters.items():
                master.grad = None
                # Still under ``p`` if there was no memory for the gradients.
                values = state.pop(master, state.get(p, {}))
                state[p] = {**values, MASTER: master.detach()}

    def _master_of(self, p: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the master of ``p``, with the value of ``p`` where that was written since the
        last step.
        """
        saved = self._optimizer.state.get(p, {}).get(MASTER)
        master = self._masters.get(p)
        if saved is None:
            return torch.nn.Parameter(
                p.detach().to(torch.float32, copy=True).as_subclass(torch.Tensor)
            )
        if saved.dtype in HALF_TYPES:
            raise CheckpointError(
                f"A float32 master has become {saved.dtype}, as load_state_dict() of"
                f" {type(self._optimizer).__name__} rounds what it loads. Load the state again, by"
                " load_state_dict() of the OptimManager."
            )
        if master is None or master.data_ptr() != saved.data_ptr():
            # The state was loaded.
            master = torch.nn.Parameter(saved.detach().to(p.device))
            self._stepped.forget(p)
        if self._stepped.written([p]):
            master.copy_(followed_master(master, p))
        return master


def with_masters(optimizer: Any, adapted: ManagedOptimizer) -> Float32Masters:
    """Return ``optimizer`` with masters; :class:`ConfigError` if it cannot have them."""
    name = type(optimizer).__name__
    if not isinstance(adapted, PlainOptimizer):
        raise ConfigError(
            f"{name} says itself how it steps half weights: add it without masters=True."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"masters=True needs an optimizer with torch's groups and states, and {name} is no"
            " torch.optim.Optimizer."
        )
    return Float32Masters(optimizer)


def warn_of_half_parameters(optimizer: Any) -> None:
    """Warn on rank 0 if ``optimizer`` steps parameters of half types itself."""
    halves = [
        p for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF_TYPES
    ]
    if halves and rank() == 0:
        warn_user(
            f"{type(optimizer).__name__} steps {len(halves)} parameters of"
            f" {str(halves[0].dtype).removeprefix('torch.')} itself, so updates that are small"
            " beside a weight are lost. add_optimizer(optimizer, masters=True) lets it step"
            " float32 copies."
        )
