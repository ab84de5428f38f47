"""``AdamOptimizer``: Adam over flat shards of any precision, with float32 masters of
half parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from bmt_core.errors import ConfigError
from bmt_core.ops import HostFlag, read_master, write_master
from bmt_core.run.runtime import rank
from bmt_core.torch_internals import Seen, without_torch_functions
from bmt_core.user_warnings import warn_user
from bmt_optim.adam.parameter_state import (
    MASTER,
    REMAINDER,
    State,
    complaint_about,
    copied_state,
    followed_master,
    master_or_remainder,
    new_master,
    new_state,
    zeros,
)
from bmt_optim.adam.update_plan import OwnerUpdates, Update, UpdatePlan, UpdateStream
from bmt_optim.current_run import kernels_on, with_a_group
from bmt_optim.managed_optimizer import ManagedOptimizer
from bmt_optim.state.logical_state import gathered_state, load_logical_state
from bmt_optim.state.torch_state import check_torch_state, with_all_options


class AdamOptimizer(torch.optim.Optimizer, ManagedOptimizer):
    """Adam, with **decoupled weight decay for half parameters and L2 regularisation for all
    others**, as in BMTrain.

    ``decoupled_weight_decay`` True (AdamW) or False (``torch.optim.Adam``) overrides this for all
    parameters. Where weight decay is given for float32 parameters and this is left open, a warning
    says so; :class:`AdamW` is the optimizer with decoupled decay in every type. Works on ordinary
    parameters and on shards. A parameter of a half type is the rounding (to nearest) of a float32
    master, which starts in the first step as a copy of the parameter; ``"exp_avg"`` and
    ``"exp_avg_sq"`` are float32 too. With s = ``scale``, t = ``"step"`` from 1::

        g <- g / s                          (+ weight_decay * p, if the decay is not decoupled)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        p <- p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
                                            (- lr * weight_decay * p, if it is decoupled)

    For float32 parameters the default is ``torch.optim.Adam`` in every bit. In the first
    ``hold_steps`` steps of a parameter the moments change and the parameter does not. Sources:
    Kingma and Ba 2015, Algorithm 1; Loshchilov and Hutter 2019, Algorithm 2.

    The master is the state ``"_param_fp32"``. If a parameter was written (``bmt.load``, an in-place
    operation), the next step notices: where its value differs from the rounded master, the value
    becomes the new master. torch counts no writes through ``.data`` of an ordinary parameter; write
    to the parameter itself, under ``torch.no_grad()``.

    ``compact_master`` True stores only the 16 bits of a bfloat16 parameter's master that the
    parameter lacks, as the state ``"_param_remainder"``: the same master, in 12 bytes per parameter
    in place of 14. For the same gradients, masters and moments are equal in every bit. Two things
    differ: a master exactly between two bfloat16 numbers is rounded away from zero, not to the even
    neighbour; and after a write, the master is within half of the last bit of the written value:
    see [Note: compact master] in :mod:`bmt_core.ops.remainder`. None means True if the run has a
    kernel that does this in one pass (``KernelProvider.has_compact_adam``), else False, because
    plain torch takes several passes. States of both kinds, and logical states, whose masters are
    whole, load with either setting.

    ``overlap_forward`` (CUDA): parameters that bmt-zero gathers, inside of Blocks and outside, are
    updated on a stream of their own while the next forward pass begins; each gather waits for the
    update of its parameters. Checkpoints, state dicts, loads, ``data`` and ``gather()`` wait too;
    code that reads or writes such a parameter in another way before the next forward pass must
    call :meth:`wait` first: docs/faster.md lists both. None is False, but the first step says
    on rank 0 what it leaves unused.

    ``params`` may be empty on the stages of a pipeline that have frozen layers only. For an
    optimizer of torch pass ``[{"params": []}]`` there, or ``bmt.optim.param_groups(model, ...)``.

    ``step`` understands the attributes ``found_inf`` and ``grad_scale`` with which
    ``torch.amp.GradScaler`` skips and unscales on the device; a scaler is refused where ranks hold
    parts of parameters.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> parameter.grad = torch.tensor([1.0, -1.0])
    >>> AdamOptimizer([parameter], lr=0.1).step()
    >>> parameter.detach()
    tensor([0.9000, 1.1000])
    """

    name: ClassVar[str] = "adam"
    skips_on_device = True
    bmt_elementwise = True
    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler
    _has_warned_of_l2 = False
    _has_said_what_is_unused = False

    _stream: UpdateStream
    _plan: UpdatePlan
    _outcome: tuple[HostFlag, list[State]] | None
    _stepped: Seen
    """The parameters with a whole master, after their last step."""

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
        overlap_forward: bool | None = None,
        compact_master: bool | None = None,
    ) -> None:
        for what, value in (
            ("lr", lr),
            ("eps", eps),
            ("weight_decay", weight_decay),
            ("hold_steps", hold_steps),
        ):
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
        self.compact_master = compact_master
        self._reset()
        super().__init__(with_a_group(params), defaults)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        scale: float = 1,
        *,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Take a step with the gradients divided by ``scale``; return the result of ``closure``,
        which is called with grad mode on.

        ``found_inf``, a tensor of one element on the device: where it is not 0, the device skips
        the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.read_outcome()
        given = vars(self)  # torch.amp.GradScaler sets these attributes
        skip: torch.Tensor | None = given.get("found_inf") if found_inf is None else found_inf
        given_scale: torch.Tensor | None = given.get("grad_scale")
        self.wait()
        with without_torch_functions():
            plan = self._updates()
            self._say_what_is_unused(plan)
            self._run(plan, scale if given_scale is None else given_scale * scale, skip)
        if skip is not None:
            states = [
                state for of_owner in plan for update in of_owner.updates for state in update.states
            ]
            self._outcome = HostFlag(skip), states
        return loss

    def wait(self) -> None:
        """Make the computation wait for updates that overlap it (``overlap_forward``), for code
        that reads or writes parameters itself.
        """
        self._stream.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; called right after :meth:`step`, their memory is free for the next
        forward pass.
        """
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    def read_outcome(self) -> None:
        """Wait for the device's decision whether to skip the last step; a skipped step does not
        count in ``"step"``.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome[0].read():
            for state in outcome[1]:
                state["step"] -= 1

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the state as torch does; masters, or their remainders, are part of it.

        If parameters are parts, it is the state of this rank's parts, and says which rank this is.

        ``gather``: ``{"parameters": ..., "groups": ...}`` with whole tensors by parameter (see
        :mod:`bmt_optim.state.logical_state`), which are collected on rank 0, one by one, and are
        empty elsewhere. Collective then.
        """
        self.read_outcome()
        self.wait()
        if gather:
            return gathered_state([self], None)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of parameters of the same shapes; moments and masters stay float32.

        States of BMTrain's Adam and torch's (without amsgrad) load too; options that they lack stay
        as they are, and masters that they lack start as copies of the parameters. A gathered state
        fits any number of ranks; only rank 0 needs its contents, and loading it is collective; the
        others pass what ``state_dict(gather=True)`` returned there, not None.

        Raises :class:`CheckpointError`, and changes nothing, if the state is another optimizer's or
        another rank's, or has another shape because it was saved at another world size.
        """
        if isinstance(state_dict, Mapping) and "parameters" in state_dict:
            self.read_outcome()
            load_logical_state([self], state_dict, None)
            return
        check_torch_state(self, state_dict)
        saved = state_dict["state"]
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        self._wait_despite_errors()
        # Without the states: torch would cast them to the parameters' dtype, which rounds moments
        # and masters of half parameters, and move them to the parameters' device.
        super().load_state_dict({**with_all_options(self, state_dict), "state": {}})
        for p, index in zip(params, indices, strict=True):
            # Not into the present tensors, which may themselves be loaded for other parameters.
            if index in saved:
                self._load_copy(p, saved[index], {})

    def portable_state(self, p: torch.nn.Parameter) -> State:
        """Return the state of ``p`` with a whole master, as checkpoints store it for any setting
        and any number of ranks.
        """
        self.wait()
        state = dict(self.state.get(p, {}))
        if REMAINDER in state:
            remainder = state.pop(REMAINDER)
            state[MASTER] = read_master(self._weight_for(remainder, p), remainder)
        elif MASTER in state:
            state[MASTER] = followed_master(state[MASTER], p)
        return state

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replace the state of ``p`` by a copy of ``state``; remove it if ``state`` is empty.

        ``state`` is one that :meth:`portable_state` returned, or has a remainder. Tensors are
        copied into the present ones if these fit, so that no second set is allocated.
        """
        self._load_copy(p, state, self.state.get(p, {}))

    def _load_copy(
        self, p: torch.nn.Parameter, state: Mapping[str, Any], into: Mapping[str, Any]
    ) -> None:
        self._wait_despite_errors()
        self.state.pop(p, None)
        self._stepped.forget(p)
        self._plan = UpdatePlan()  # the old plan keeps the old state alive
        if state:
            self.state[p] = copied_state(state, p, self._state_device(p), into)

    def complaint_about_state(
        self, shapes: Mapping[str, torch.Size | None], shape: torch.Size
    ) -> str | None:
        return complaint_about(shapes, shape)

    def complaint_about_options(self, options: Mapping[str, Any]) -> str | None:
        return (
            None
            if "betas" in options
            else f"has no betas but {', '.join(options)}: it is another optimizer's"
        )

    def __getstate__(self) -> dict[str, Any]:
        self.read_outcome()
        self.wait()
        found: dict[str, Any] = super().__getstate__()
        return {**found, "compact_master": self.compact_master}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:
            group.setdefault("overlap_forward", False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``; the constructor calls it, too."""
        super().add_param_group(param_group)
        self._warn_of_l2(self.param_groups[-1])

    def _warn_of_l2(self, group: Mapping[str, Any]) -> None:
        """Warn once, on rank 0, if weight decay is L2 regularisation only because nobody has said
        which of the two it is.
        """
        wide = [p.dtype for p in group["params"] if p.dtype not in (torch.float16, torch.bfloat16)]
        is_chosen = group["decoupled_weight_decay"] is not None or not group["weight_decay"]
        if is_chosen or not wide or rank() > 0 or self._has_warned_of_l2:
            return
        self._has_warned_of_l2 = True
        warn_user(
            f"{type(self).__name__} has weight_decay={group['weight_decay']} for {len(wide)}"
            f" parameters of {wide[0]}, and adds it to their gradients (L2), as torch.optim.Adam"
            " and BMTrain do. Only parameters of half types decay as with AdamW. For AdamW in every"
            " type use bmt.optim.AdamW, or say decoupled_weight_decay=True; to keep L2, say"
            " decoupled_weight_decay=False."
        )

    def _reset(self) -> None:
        """Reset everything that is not part of the state: outcomes, streams, and caches made from
        parameters and their states.
        """
        self._outcome = None
        self._stepped = Seen()
        self._stream = UpdateStream()
        self._plan = UpdatePlan()

    def _wait_despite_errors(self) -> None:
        """Make the computation wait for updates, even failed ones: their results will
        be replaced.
        """
        self._stream.wait()

    def _state_device(self, p: torch.nn.Parameter) -> torch.device:
        return p.device

    def _weight_for(self, remainder: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the bfloat16 values of ``p`` that ``remainder`` completes. The dtype of ``p`` may
        have changed since.
        """
        return p.detach().to(remainder.device, torch.bfloat16)

    def _updates(self) -> list[OwnerUpdates]:
        for group in self.param_groups:
            for option in ("amsgrad", "maximize"):  # of torch's Adam; a state may bring them, too
                if group.get(option):
                    raise ConfigError(
                        f"A group of {type(self).__name__} has {option}={group[option]}, which it"
                        " does not know. Leave it out, or use torch.optim.Adam or AdamW."
                    )
        return self._plan.of(self.param_groups, self.state, self._state_of, self._is_on_host)

    def _is_on_host(self, p: torch.nn.Parameter) -> bool:
        """Whether the state of ``p`` is on the host and stepped there: for
        :class:`AdamOffloadOptimizer`.
        """
        return False

    def _state_of(self, p: torch.nn.Parameter) -> State:
        """Return the state of ``p`` for the step, a new one if need be, with its master in the form
        of this setting.

        Only a step changes the form, because until then the parameter's values may still be loaded.
        """
        state: State = self.state[p]
        is_compact = self._is_compact(p)
        if not state:
            state.update(new_state(p, is_compact=is_compact))
        elif MASTER in state and is_compact:
            state[REMAINDER] = zeros(p, torch.int16)
            write_master(followed_master(state.pop(MASTER), p), p, state[REMAINDER])
        elif REMAINDER in state and not is_compact:
            remainder = state.pop(REMAINDER)
            state[MASTER] = read_master(self._weight_for(remainder, p), remainder)
        elif master_or_remainder(state) is None:
            # A state of torch's Adam, or the parameter became a half type.
            state |= new_master(p, is_compact=is_compact)
        return state

    def _is_compact(self, p: torch.nn.Parameter) -> bool:
        if p.dtype != torch.bfloat16:
            return False
        return (
            kernels_on(p.device).has_compact_adam
            if self.compact_master is None
            else self.compact_master
        )

    def _read_written(self, params: list[torch.nn.Parameter]) -> None:
        """Update the whole masters of parameters that were written since the last step, which their
        versions show.
        """
        for p in self._stepped.written(params):
            self.state[p][MASTER].copy_(followed_master(self.state[p][MASTER], p))

    def _say_what_is_unused(self, plan: list[OwnerUpdates]) -> None:
        """Say on rank 0, once, that ``overlap_forward`` was left open where it saves time."""
        if self._has_said_what_is_unused:
            return
        self._has_said_what_is_unused = True
        could_overlap = [
            update
            for of_owner in plan
            if of_owner.owner is not None and self._stream.exists_on(of_owner.device)
            for update in of_owner.updates
            if update.group["overlap_forward"] is None
        ]
        if could_overlap and rank() == 0:
            print(
                f"bmt: {type(self).__name__} updates all parameters before the next forward pass"
                " begins. With overlap_forward=True the first Blocks begin meanwhile, and code that"
                " reads parameters after a step calls optimizer.wait() before;"
                " overlap_forward=False keeps it as it is without this line.",
                flush=True,
            )

    def _run(
        self, plan: list[OwnerUpdates], divisor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        with_masters = [
            p for of_owner in plan for update in of_owner.updates for p in update.with_whole_masters
        ]
        self._read_written(with_masters)
        for device in {
            u.device for of_owner in plan for u in of_owner.updates if u.group["overlap_forward"]
        }:
            self._stream.begin(device)
        for of_owner in plan:
            self._update(of_owner, divisor, skip)
        self._stepped.note(with_masters)

    def _update(
        self, of_owner: OwnerUpdates, divisor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        owner, overlaps = of_owner.owner, of_owner.overlaps_forward
        with self._stream.launch_on(of_owner.device) if overlaps else nullcontext():
            grads = [_launch(update, divisor, skip) for update in of_owner.updates]
            if owner is not None:
                # A gather of this owner waits for this update only.
                owner.note_update(reads=(grads, divisor, skip) if overlaps else None)


def _launch(
    update: Update, divisor: float | torch.Tensor, skip: torch.Tensor | None
) -> list[torch.Tensor]:
    """Take one step of the parameters of ``update``, and return the gradients, which the device
    reads later.
    """
    states, step = update.states, update.count_step()
    grads = [p.grad for p in update.params if p.grad is not None]
    kernels_on(update.device).adam_step(
        update.params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state.get(REMAINDER, state.get(MASTER)) for state in states],
        **update.settings(step),
        scale=divisor,
        skip=skip,
    )
    return grads
