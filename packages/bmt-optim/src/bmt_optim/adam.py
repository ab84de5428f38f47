"""``AdamOptimizer``: Adam over flat shards of any precision, with float32 masters of half parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from bmt_core.errors import CheckpointError
from bmt_core.ops import HostFlag
from bmt_core.parameter import DistributedParameter, Owner
from bmt_optim.beside import Beside
from bmt_optim.run import kernels_on

MASTER = "_param_fp32"


class AdamOptimizer(torch.optim.Optimizer):
    """Adam, with **decoupled weight decay for half parameters and L2 regularisation for all others**, as in BMTrain.

    ``decoupled_weight_decay`` True (AdamW) or False (``torch.optim.Adam``) overrides this for all parameters. Works on ordinary
    parameters and on shards. Parameters of half types keep a float32 master, the state ``"_param_fp32"``, and are the
    master rounded to nearest; ``"exp_avg"`` and ``"exp_avg_sq"`` are float32 too. The master is made in the first step: values
    that are loaded into a model later need the optimizer's state with them. With s = ``scale``, t = ``"step"`` from 1::

        g <- g / s                          (g <- g / s + weight_decay * p, if the decay is not decoupled)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        p <- p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)    (- lr * weight_decay * p, if decoupled)

    For float32 parameters the default is ``torch.optim.Adam`` in every bit. For the first ``hold_steps`` steps of a parameter the
    moments move and the parameter does not. Sources: Kingma and Ba 2015, Algorithm 1; Loshchilov and Hutter 2019, Algorithm 2.

    ``overlap_forward`` (CUDA): parameters of Blocks are updated on a stream of their own while the next forward pass begins; each
    Block waits for its own update. Checkpoints, state dicts, ``data`` and ``gather()`` wait too; code that reads such a
    parameter in another way before the next forward pass must call :meth:`wait` first.

    ``step`` understands the attributes ``found_inf`` and ``grad_scale`` with which ``torch.amp.GradScaler`` skips and unscales
    on the device; ``OptimManager`` uses the first.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> parameter.grad = torch.tensor([1.0, -1.0])
    >>> AdamOptimizer([parameter], lr=0.1).step()
    >>> parameter.detach()
    tensor([0.9000, 1.1000])
    """

    name: ClassVar[str] = "adam"
    _step_supports_amp_scaling = True

    found_inf: torch.Tensor
    grad_scale: torch.Tensor

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        *,
        decoupled_weight_decay: bool | None = None,
        overlap_forward: bool = False,
    ) -> None:
        for what, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("hold_steps", hold_steps)):
            if not value >= 0:
                raise ValueError(f"{what} must not be negative, it is {value}.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, they are {betas}.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hold_steps": hold_steps,
            "decoupled_weight_decay": decoupled_weight_decay,
            "overlap_forward": overlap_forward,
        }
        self._unsure = _Unsure()
        self._beside = Beside()
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], torch.Tensor] | None = None, scale: float = 1
    ) -> torch.Tensor | None:
        """Take a step with the gradients divided by ``scale``; return what ``closure``, called with gradients on, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        divisor: float | torch.Tensor = scale
        given_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if given_scale is not None:
            divisor = given_scale * scale
        states = []
        self.wait()
        for group in self.param_groups:
            batches = self._batches(group)
            for device in {key.device for key in batches}:
                self._beside.begin(device)
            for key, batch in batches.items():
                self._update(key, batch, group, divisor, skip)
                states += batch.states
        if skip is not None:
            self._unsure = _Unsure(HostFlag(skip), states)
        return loss

    def wait(self) -> None:
        """Let the computation wait for updates that run beside it (``overlap_forward``), before parameters are read by hand."""
        self._beside.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; called right after :meth:`step`, their memory is free for the next forward pass."""
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    def _update(
        self,
        key: _Key,
        batch: _Batch,
        group: dict[str, Any],
        divisor: float | torch.Tensor,
        skip: torch.Tensor | None,
    ) -> None:
        if key.owner is None:
            _launch(key, batch, group, divisor, skip)
            return
        with self._beside.running(key.device) if group["overlap_forward"] else nullcontext():
            _launch(key, batch, group, divisor, skip)
            key.owner.data_changed()  # a gather of this owner's waits for its own update only
        if group["overlap_forward"]:
            key.owner.keep((batch.grads, divisor, skip))

    def settle(self) -> None:
        """Wait for the device to have decided whether it skipped the last step, and count ``"step"`` accordingly."""
        self._unsure.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does; masters are part of it."""
        self.settle()
        self.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of parameters of the same shapes; moments and masters stay float32.

        Raises :class:`CheckpointError`, and changes nothing, when a shape differs: the state is that of another world size.
        """
        saved = state_dict["state"]
        places = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        if len(places) != len(indices):
            raise CheckpointError(f"The state is of {len(indices)} parameters, and this optimizer has {len(places)}.")
        for number, (p, index) in enumerate(zip(places, indices, strict=True)):
            for key, value in saved.get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
                    raise CheckpointError(
                        f"{key} of parameter {number} has shape {tuple(value.shape)}, and the parameter here has {tuple(p.shape)}."
                        " It was saved at another world size. Save with gather_opt=True to load at any."
                    )
        self._unsure = _Unsure()
        self.wait()
        super().load_state_dict(state_dict)
        # torch casts floating-point state to the parameter's dtype, which would round moments and masters of half parameters.
        for p, index in zip(places, indices, strict=True):
            if index in saved:
                self.state[p] = {key: _own_copy(value, p) for key, value in saved[index].items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._unsure = _Unsure()
        self._beside = Beside()
        for group in self.param_groups:
            group.setdefault("overlap_forward", False)

    def _batches(self, group: dict[str, Any]) -> dict[_Key, _Batch]:
        """Advance the parameters of ``group`` that have gradients by one step, and sort them by what a launch has in common."""
        batches: dict[_Key, _Batch] = {}
        decoupled = group["decoupled_weight_decay"]
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise TypeError(
                    "AdamOptimizer takes dense gradients. Use torch.optim.SparseAdam for sparse embeddings."
                )
            state = self.state[p]
            if not state:
                state.update(_new_state(p))
            state["step"] += 1
            is_half = MASTER in state
            key = _Key(p.device, int(state["step"]), is_half if decoupled is None else decoupled, _owner_of(p))
            batches.setdefault(key, _Batch()).add(p, state)
        return batches


@dataclass(frozen=True)
class _Key:
    device: torch.device
    step: int
    decoupled: bool
    owner: Owner | None


@dataclass
class _Batch:
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def add(self, p: torch.nn.Parameter, state: dict[str, Any]) -> None:
        assert p.grad is not None
        self.params.append(p)
        self.grads.append(p.grad)
        self.states.append(state)


class _Unsure:
    """A step of which the host does not know yet whether the device skipped it: a skipped step does not count."""

    def __init__(self, skipped: HostFlag | None = None, states: Iterable[dict[str, Any]] = ()) -> None:
        self._skipped = skipped
        self._states = list(states)

    def settle(self) -> None:
        if self._skipped is not None and self._skipped.read():
            for state in self._states:
                state["step"] -= 1
        self._skipped, self._states = None, []


def _launch(
    key: _Key, batch: _Batch, group: dict[str, Any], divisor: float | torch.Tensor, skip: torch.Tensor | None
) -> None:
    kernels_on(key.device).adam_step(
        batch.params,
        batch.grads,
        [state["exp_avg"] for state in batch.states],
        [state["exp_avg_sq"] for state in batch.states],
        [state.get(MASTER) for state in batch.states],
        step=key.step,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=key.decoupled,
        hold=key.step <= group["hold_steps"],
        scale=divisor,
        skip=skip,
    )


def _owner_of(p: torch.Tensor) -> Owner | None:
    return p._owner() if isinstance(p, DistributedParameter) and p._owner is not None else None


def _new_state(p: torch.nn.Parameter) -> dict[str, Any]:
    # Half moments would overflow (fp16) or stall (bf16), so state is never narrower than float32.
    dtype = torch.promote_types(p.dtype, torch.float32)
    state = {"step": 0, "exp_avg": _zeros(p, dtype), "exp_avg_sq": _zeros(p, dtype)}
    if p.dtype != dtype:
        state[MASTER] = p.detach().to(dtype)
    return state


def _zeros(p: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def _own_copy(value: Any, p: torch.nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = torch.promote_types(p.dtype, torch.float32)
    return value.detach().to(device=p.device, dtype=wide if value.is_floating_point() else value.dtype, copy=True)
