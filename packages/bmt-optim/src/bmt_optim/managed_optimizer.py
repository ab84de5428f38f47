"""``ManagedOptimizer``: the interface of optimizers for ``OptimManager``, and adapters for
optimizers without it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import without_torch_functions
from bmt_optim.current_run import device_of, kernels_for
from bmt_params.guards.optimizer_kind import kinds_of_groups
from bmt_params.state.state_tensors import StateOwner

_NOTHING = nullcontext()
_COMMON_KEYS = {"params", "param_names", "initial_lr"}  # keys that groups of any optimizer may have


class ManagedOptimizer(ABC):
    """An optimizer that ``OptimManager`` can drive.

    ``AdamOptimizer`` is one; :func:`managed` adapts any other optimizer. Derive your own class from
    this one and ``torch.optim.Optimizer`` if it can skip a step on the device, copies gradients
    before the step, or keeps state in a form that a checkpoint should not store.
    """

    param_groups: list[dict[str, Any]]

    skips_on_device: ClassVar[bool] = False
    """Whether :meth:`step` understands ``found_inf``. If not, the manager reads the flag, and calls
    ``step`` only if it is 0.
    """

    rounds_moments = False
    """Whether a step needs moments in the parameter's dtype, as those of torch's optimizers do."""

    @abstractmethod
    def step(self, *, scale: float = 1, found_inf: torch.Tensor | None = None) -> object:
        """Take a step with the gradients divided by ``scale``.

        ``found_inf`` is a float32 tensor without dimensions on the device: where it is not 0,
        nothing may change. It is given only if :attr:`skips_on_device`.
        """

    def read_outcome(self) -> None:
        """Find out whether the device skipped the last step. Called before the next step, and
        before state is saved or loaded.
        """
        return None

    def scaling_gradients(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        """Return a context in which the manager multiplies the gradients of ``parameters`` by
        ``factor``, on the device.

        If ``factor`` is None, the manager sets them to zero in the context if the step will be
        skipped. An optimizer that has copied gradients can multiply its copies and need not
        copy again.
        """
        return _NOTHING

    @abstractmethod
    def portable_state(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """Return the state of ``p`` as a checkpoint stores it, whatever the settings of
        the optimizer.
        """

    @abstractmethod
    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replace the state of ``p`` by ``state``; if that is empty, remove it."""

    def state_owner(self, p: torch.nn.Parameter) -> StateOwner | None:
        """Return which rank alone has the state of ``p``, of the whole parameter; None if each rank
        has that of its own part.

        Other ranks return an empty state from :meth:`portable_state`, and
        :meth:`load_portable_state` ignores what they are given.
        """
        return None

    def counted_options(self, index: int) -> dict[str, Any]:
        """Return options of parameter group ``index`` that steps change, and that ranks without its
        tensors do not know.
        """
        return {}

    def note_loaded_options(self) -> None:
        """Called when the groups have got the options of a state, which may be another class's."""
        return None

    def complaint_about_state(
        self, shapes: Mapping[str, torch.Size | None], shape: torch.Size
    ) -> str | None:
        """Return why this optimizer cannot load the state of a parameter of ``shape``; None if
        it can.

        ``shapes`` has the shapes of the state's tensors, and None for other values. Called before
        anything is loaded.
        """
        return None

    def complaint_about_options(self, options: Mapping[str, Any]) -> str | None:
        """Return why the saved ``options`` of a group cannot be this optimizer's; None if they can.

        Options of another version may lack keys or have more; options that do both are
        another optimizer's.
        """
        here = set().union(*self.param_groups)
        missing, extra = (
            sorted(here - set(options) - _COMMON_KEYS),
            sorted(set(options) - here - _COMMON_KEYS),
        )
        if not missing or not extra:
            return None
        return f"has no {', '.join(missing)} but {', '.join(extra)}: it is another optimizer's"


# What torch's optimizers call the tensors in their states that have the parameter's shape. Others
# are numbers, or of other shapes.
_OF_THE_PARAMETERS_SHAPE = {
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}


def managed(optimizer: Any) -> ManagedOptimizer:
    """Return ``optimizer`` itself if it is a :class:`ManagedOptimizer`, otherwise an adapter
    for it.

    ``step(scale=...)`` is called if its ``step`` has such a parameter that is 1 by default, as
    BMTrain's optimizers have (apex's also have one, None by default, for other purposes). For other
    optimizers, gradients are divided by the scale before ``step()``, unless the optimizer declares,
    as torch's fused ones do, that it reads ``found_inf`` and ``grad_scale`` as
    ``torch.amp.GradScaler`` sets them. One whose step needs a closure, with any parameters, is
    refused with :class:`ConfigError`.
    """
    if isinstance(optimizer, ManagedOptimizer):
        return optimizer
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(
            f"An optimizer has param_groups and step(), {type(optimizer).__name__} has not."
        )
    if any(kind.needs_closure for kind in kinds_of_groups(optimizer)):
        name = type(optimizer).__name__
        raise ConfigError(
            f"The step of {name} needs a closure, and OptimManager.step() has none. Take another"
            " optimizer (AdamW, say). Or, on one rank or at zero_level=0, call"
            f" {name}.step(closure) in a loop without an OptimManager."
        )
    scale = inspect.signature(optimizer.step).parameters.get("scale")
    if scale is not None and scale.default == 1:
        return _StepTakesScale(optimizer)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return _StepReadsFlag(optimizer)
    return PlainOptimizer(optimizer)


def complaint_about_shapes(
    keys: Iterable[str], shapes: Mapping[str, torch.Size | None], shape: torch.Size
) -> str | None:
    """Return which of ``keys`` is in ``shapes`` and has not the parameter's ``shape``, as a text;
    None if all have it.
    """
    for key in keys:
        found = shapes.get(key, shape)
        if found is None or (found or (1,)) != (shape or (1,)):
            what = "no tensor" if found is None else f"of shape {tuple(found)}"
            return f"has {key} {what}, and the parameter here has {tuple(shape)}"
    return None


def widened(value: Any, p: torch.Tensor) -> Any:
    """Return ``value``, of the state of ``p``; if it is a tensor of a half type, which ``p`` had
    before, in the dtype of ``p``.
    """
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(p.dtype) if is_half and p.dtype.itemsize > 2 else value


class PlainOptimizer(ManagedOptimizer):
    """An optimizer that knows neither scales nor flags: its gradients are divided in place, in
    their own dtype.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
        self.rounds_moments = self._is_torchs

    @property
    # load_state_dict() replaces the optimizer's list.
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self, *, scale: float = 1, found_inf: torch.Tensor | None = None) -> object:
        if scale != 1:
            params = [p for group in self.param_groups for p in group["params"]]
            grads, device = [p.grad for p in params if p.grad is not None], device_of(params)
            kernels_for(grads, device).scale_(grads, torch.full((), 1.0 / scale, device=device))
        return self._step()

    def _step(self) -> object:
        # torch's own optimizers read several attributes of each parameter, and are right for parts.
        with without_torch_functions() if self._is_torchs else _NOTHING:
            return self._optimizer.step()

    def portable_state(self, p: torch.nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(p, {})
        return state

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        self._optimizer.state.pop(p, None)
        if state and self._is_torchs:
            state = {key: widened(value, p) for key, value in state.items()}
        for key in _OF_THE_PARAMETERS_SHAPE & state.keys() if self.rounds_moments else ():
            if isinstance(state[key], torch.Tensor):
                state = {**state, key: state[key].to(p.dtype)}
        if state:
            self._optimizer.state[p] = dict(state)

    def note_loaded_options(self) -> None:
        if self._is_torchs:  # as at the end of its load_state_dict()
            self._optimizer.__setstate__({})

    def complaint_about_state(
        self, shapes: Mapping[str, torch.Size | None], shape: torch.Size
    ) -> str | None:
        if not self._is_torchs:
            return None  # another library may keep other tensors under these names
        # Older versions of SGD have a momentum_buffer None if there is no momentum.
        keys = {
            key
            for key in _OF_THE_PARAMETERS_SHAPE & shapes.keys()
            if shapes[key] is not None or key != "momentum_buffer"
        }
        return complaint_about_shapes(sorted(keys), shapes, shape)


class _StepTakesScale(PlainOptimizer):
    """An optimizer like BMTrain's: ``step(scale=...)`` divides the gradients."""

    def step(self, *, scale: float = 1, found_inf: torch.Tensor | None = None) -> object:
        return self._optimizer.step(scale=scale)


class _StepReadsFlag(PlainOptimizer):
    """An optimizer with the attributes of ``torch.amp.GradScaler``: ``found_inf`` skips the step,
    ``grad_scale`` divides.
    """

    skips_on_device = True

    def step(self, *, scale: float = 1, found_inf: torch.Tensor | None = None) -> object:
        if found_inf is None:
            return super().step(scale=scale)
        optimizer = self._optimizer
        optimizer.found_inf = found_inf
        optimizer.grad_scale = (
            None if scale == 1 else torch.full((), float(scale), device=found_inf.device)
        )
        try:
            return self._step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale
