"""``OptimManager``: loss scaling, overflow, clipping and stepping for any number of optimizers.

[Note: who reads the overflow flag]
One flag on the device says whether a gradient of any rank is infinite or NaN. For an optimizer that
cannot skip a step on the device, or a scheduler that cannot go back, ``step`` reads the flag on the
host, and on CUDA the device idles for as long as the host takes to launch the optimizer.

When every optimizer can skip on the device (``ManagedOptimizer.skips_on_device``) and every
scheduler is one of bmt's, ``step`` does not read the flag. It passes the flag to the optimizers,
zeroes the gradients on the device if the flag is set, steps the schedulers as if it were not set,
and starts a copy of the flag to the host. The next call that needs to know
(:meth:`OptimManager.read_outcome`) reads this copy, changes the scale, and sets the schedulers back
if the step was skipped. Parameters and moments are the same either way; only the schedulers are one
step ahead between a skipped step and the next call. On the CPU reading costs nothing, and the flag
is read at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch

from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.ops import HostFlag
from bmt_core.run.runtime import current, is_initialized, rank
from bmt_core.torch_internals import without_torch_functions
from bmt_core.user_warnings import warn_user
from bmt_optim.clipping import clip, parameters_in
from bmt_optim.current_run import device_of, gradient_divisor, kernels_for, world
from bmt_optim.float32_masters import warn_of_half_parameters, with_masters
from bmt_optim.loss_scale import LossScale
from bmt_optim.lr_scheduler import WarmupLRScheduler
from bmt_optim.managed_optimizer import ManagedOptimizer, PlainOptimizer, managed
from bmt_optim.plain_gradients import PlainGradients
from bmt_optim.same_batches import SameBatches
from bmt_optim.scheduler_steps import SchedulerSteps, check_scheduler, check_schedulers
from bmt_optim.state.logical_state import (
    Named,
    check_logical_state,
    gathered_state,
    load_logical_state,
    logical_state,
)
from bmt_optim.state.rank_state import check_rank_state, load_rank_state, rank_state
from bmt_optim.state.state_form import check_form, checking_form, with_head_of_rank_0
from bmt_optim.token_counts import TokenCounts, check_number
from bmt_optim.whole_tensors.optimizer import whole_if_needed, whole_of
from bmt_params.guards.elementwise import check_elementwise
from bmt_params.guards.ndim_groups import check_groups_by_ndim
from bmt_params.guards.same_data import LossComparison
from bmt_params.models_of_run import ModelsOfRun
from bmt_params.parameter import reduce_held_back

NonFinite = Literal["skip", "raise", "ignore"]
logger = logging.getLogger("bmt_optim")


_ADD = "Hand it to add_optimizer(optimizer, lr_scheduler)."


class OptimManager:
    """Steps several optimizers, with their schedulers, as one.

    Every iteration: ``backward(loss)`` (as often as there are micro-batches),
    ``clip_grad_norm(...)`` if wanted, ``step()``, and ``zero_grad()`` right after it, so that the
    next forward has the gradients' memory. All of them are collective: every rank calls them in the
    same order.

    Gradients of sharded parameters are *sums* over all ranks. So ``backward`` multiplies the loss
    by ``loss_scale / grad_scale`` first. By default ``grad_scale`` is the number of ranks that see
    different data: gradients are then those of the mean loss over all data, times the loss scale.
    Over k micro-batches, pass ``loss / k``. That is a mean of means where ranks or micro-batches
    have different numbers of tokens; ``backward(loss_sum, count=tokens)`` gives the gradients of
    the mean over all tokens. ``loss.backward()`` and ``optimizer.step()`` without a
    manager work too, with sums. After ``init_distributed(gradients="mean")`` gradients are already
    means, and ``grad_scale`` is 1. Gradients of *ordinary* parameters are local until
    ``clip_grad_norm`` or ``step`` sums them over all ranks, once; pass
    ``sum_plain_gradients=False`` if your program sums them. A later ``backward`` adds to them as in
    plain torch. If all parameters are ordinary, and no manager has scaled a loss since the last
    step or ``zero_grad()`` (plain ``loss.backward()``), the sums are divided by ``grad_scale``, so
    that gradients are means here too.

    - ``loss_scale``: the first scale of losses; None: no scaling. With one, a step in which any
      gradient of any rank is infinite or NaN is skipped: gradients are cleared, no optimizer and no
      scheduler steps.
    - ``loss_scale_factor``, ``loss_scale_steps``: a skipped step divides the scale by the factor;
      this many clean steps multiply it.
    - ``min_loss_scale``, ``max_loss_scale``: the limits of the scale.
    - ``grad_scale``: the number by which losses are divided, see above.
    - ``non_finite``: what a gradient that is infinite or NaN does without loss scaling. ``"skip"``
      the step with a ``RuntimeWarning`` on rank 0, ``"raise"`` :class:`FloatingPointError` on every
      rank (then the host reads the flag in every step), or ``"ignore"``: take the step unchecked.
      ``skipped_steps`` counts skipped steps.
    - ``sum_plain_gradients``: whether the manager sums the gradients of ordinary parameters, see
      above.
    """

    @explain_keywords(
        growth_factor="loss_scale_factor",
        growth_interval="loss_scale_steps",
        init_scale="loss_scale",
        lr_scheduler=_ADD,
        max_norm="Call clip_grad_norm(model.parameters(), max_norm) before step().",
        optimizer=_ADD,
        optimizers=_ADD,
        scaler="loss_scale",
    )
    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2,
        loss_scale_steps: int = 1024,
        min_loss_scale: float = 1,
        max_loss_scale: float = math.inf,
        grad_scale: float | None = None,
        *,
        non_finite: NonFinite = "skip",
        sum_plain_gradients: bool = True,
    ) -> None:
        if non_finite not in ("skip", "raise", "ignore"):
            raise ValueError(f"non_finite must be 'skip', 'raise' or 'ignore', not {non_finite!r}.")
        self._scale = LossScale(
            value=loss_scale,
            factor=loss_scale_factor,
            steps=loss_scale_steps,
            minimum=min_loss_scale,
            maximum=max_loss_scale,
        )
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[Any] = []
        self.non_finite = non_finite
        self.sum_plain_gradients = sum_plain_gradients
        self.skipped_steps = 0
        self.grad_scale = grad_scale
        self._managed: list[ManagedOptimizer] = []
        self._plain = PlainGradients()
        self._scaled_losses = _scaled_losses()  # of the run, before the gradients of this step
        self._counts = TokenCounts()
        self._left_gradients = False  # whether there were any after the last pass with a count
        self._same_batches = SameBatches()
        self._scheduler_steps = SchedulerSteps()
        # The flag of the last step, if nobody has read it, the schedulers' steps before it, and the
        # number of its tokens.
        self._outcome: (
            tuple[HostFlag, list[tuple[WarmupLRScheduler, int]], torch.Tensor | None] | None
        ) = None

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by; 1 without loss scaling.

        May be assigned between steps, on every rank; None turns loss scaling off.
        """
        self.read_outcome()
        return 1 if self._scale.value is None else self._scale.value

    @loss_scale.setter
    def loss_scale(self, value: float | None) -> None:
        # Without loss scaling the property is 1; assigning that value must not turn scaling on.
        if value != 1 or self.loss_scale_enabled:
            self._set_scale(value=value)

    @property
    def loss_scale_enabled(self) -> bool:
        """Whether there is loss scaling."""
        return self._scale.value is not None

    @property
    def loss_scale_factor(self) -> float:
        """The factor by which the scale changes. This and the next three may be assigned between
        steps, on every rank.
        """
        return self._scale.factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float) -> None:
        self._set_scale(factor=value)

    @property
    def loss_scale_steps(self) -> int:
        """Number of clean steps after which the scale increases."""
        return self._scale.steps

    @loss_scale_steps.setter
    def loss_scale_steps(self, value: int) -> None:
        self._set_scale(steps=value)

    @property
    def min_loss_scale(self) -> float:
        """The scale below which an overflow does not decrease it."""
        return self._scale.minimum

    @min_loss_scale.setter
    def min_loss_scale(self, value: float) -> None:
        self._set_scale(minimum=value)

    @property
    def max_loss_scale(self) -> float:
        """The scale above which clean steps do not increase it."""
        return self._scale.maximum

    @max_loss_scale.setter
    def max_loss_scale(self, value: float) -> None:
        self._set_scale(maximum=value)

    @property
    def steps_since_last_scale(self) -> int:
        """Number of clean steps since the scale changed."""
        self.read_outcome()
        return self._scale.steps_since_last_scale

    @property
    def grad_scale(self) -> float:
        """The divisor of losses: unless given, the number of ranks that see different data, or 1 if
        gradients are means.
        """
        if self._grad_scale is not None:
            return self._grad_scale
        return current().topology.data_size // gradient_divisor() if is_initialized() else 1

    @grad_scale.setter
    def grad_scale(self, value: float | None) -> None:
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"grad_scale must be a positive number or None, it is {value}.")
        self._grad_scale = value

    @explain_keywords(scheduler="lr_scheduler")
    def add_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        *,
        masters: bool = False,
        whole: Literal["auto", "refuse", True] = "auto",
    ) -> None:
        """Add an optimizer, bmt's or any other, and the scheduler that is stepped after it.

        An optimizer with ``step(scale=1)`` is given the loss scale; for any other the gradients are
        divided by it, in place and in their own dtype, before its ``step``: see
        :func:`bmt_optim.managed_optimizer.managed`. One that has
        ``_on_justify_scale(old_scale, new_scale)``, as some written for BMTrain, is told when the
        loss scale changes. A scheduler whose ``step`` needs arguments, such as
        ``ReduceLROnPlateau``, is refused with :class:`ConfigError`, and so are groups with and
        without weight decay that were chosen by ``p.dim()``: see :func:`param_groups`. So is an
        optimizer whose step needs a closure, such as torch's LBFGS.

        ``whole``: what to do with an optimizer that needs whole tensors, which is found out if
        parameters are sharded: see :mod:`bmt_params.guards.elementwise`. ``"auto"``, the default:
        step whole tensors, each on one rank, as an optimizer that :func:`bmt_optim.whole` returns,
        and say so once, with the bytes that a step sends. ``True``: so for every optimizer, and
        nothing is said. ``"refuse"``: raise :class:`ConfigError` where this rank has parts. One
        that needs all tensors at once is refused by ``"auto"`` too. To step whole
        tensors, :attr:`optimizers` has another optimizer in place of the one given, which must not
        have stepped. That one keeps the groups, which schedulers change; its ``step``,
        ``state_dict`` and ``load_state_dict`` raise from then on. Collective, except for
        optimizers of bmt.

        ``masters``: an elementwise optimizer steps float32 copies of parameters of half types, and
        these are the copies, rounded. The copies are part of its state; gradients are divided by
        the loss scale in float32. Without it, updates that are small beside a half weight are lost,
        which is warned about. Optimizers of bmt, and those with ``whole``, keep such copies
        by themselves.
        """
        if any(optimizer in (known, getattr(known, "original", None)) for known in self.optimizers):
            raise ValueError("This optimizer was added already.")
        if whole not in ("auto", "refuse", True):
            raise ValueError(f"whole must be 'auto', 'refuse' or True, not {whole!r}.")
        check_scheduler(lr_scheduler)
        groups = managed(optimizer).param_groups
        check_groups_by_ndim(groups)
        own = {p for group in groups for p in group["params"]}
        if self.loss_scale_enabled and not own.isdisjoint(self._each_parameter()):
            raise ConfigError(
                f"A parameter of {type(optimizer).__name__} is in another optimizer of this manager"
                " too, and each would divide its gradient by the loss scale. Give it to one of"
                " them, or pass OptimManager(loss_scale=None)."
            )
        given = optimizer
        if whole != "refuse":
            optimizer = whole_if_needed(given) if whole == "auto" else whole_of(given)
        adapted = managed(optimizer)
        if masters and optimizer is given:
            adapted = with_masters(optimizer, adapted)
        elif isinstance(adapted, PlainOptimizer):
            warn_of_half_parameters(optimizer)
        check_elementwise(optimizer)
        self._managed.append(adapted)
        self.optimizers.append(optimizer)
        self.lr_schedulers.append(lr_scheduler)

    def zero_grad(self) -> None:
        """Clear the gradients of all optimizers: they become None, as in torch. BMTrain filled them
        with zeros.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._forget_gradients()

    def scale_loss(
        self, loss: torch.Tensor, *, count: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """Return ``loss * loss_scale / grad_scale``, to call ``backward()`` on. With ``count`` see
        :meth:`backward`; the first such call of a step is collective.
        """
        parts = current().topology.parts_axes if is_initialized() else []
        if count is None and parts:
            raise ValueError(
                f"The losses of ranks along {parts[0]!r} are parts of one sum, which is divided by"
                " the number of tokens of all ranks. Pass the sum of this rank's losses and the"
                " number of its target tokens: manager.backward(loss_sum, count=tokens); to"
                " train_step, count_fn."
            )
        self._counts.check_kind(is_counted=count is not None)
        factor: float | torch.Tensor = self.loss_scale / self.grad_scale
        if count is not None:
            if self._left_gradients and not self._has_gradients():
                self._counts.forget_own()
            divisor = self._counts.add(count, device_of(self._each_parameter()))
            factor = self.loss_scale * gradient_divisor() / divisor
            factor = factor.to(torch.promote_types(loss.dtype, torch.float32))
        if self._plain.summed:
            self._plain.share_out(world())
        if is_initialized():
            run = current()
            run.state(ModelsOfRun).scaled_losses += 1
            comparison = run.state(LossComparison)
            if comparison.axes:
                comparison.check(loss)
        return loss * factor

    def backward(self, loss: torch.Tensor, *, count: torch.Tensor | float | None = None) -> None:
        """Scale ``loss`` and run its backward pass, including all reductions of gradients.

        With ``count``, ``loss`` is the sum, not the mean, of the losses of this rank's tokens in
        this call, and ``count`` the number of these tokens: a number or a 0-dim tensor, 0 or more,
        which the host does not read. Over all calls of a step and all ranks that see different
        data, gradients are those of the sum of losses / the sum of counts, as plain torch computes
        them for the mean over the tokens of the whole batch; ``grad_scale`` has no effect. The
        first of :meth:`clip_grad_norm`, :meth:`unscaled_gradients` and :meth:`step` completes the
        division; before, gradients are divided by the number of tokens of the first call. If no
        rank has any token, they are those of the sum, which are zero. ``ValueError`` for a step
        with and without counts, and for a count that is no such number; if it is a tensor, and
        negative, infinite or NaN, every rank raises it when it reads that the step was skipped.
        """
        with self._counted_pass() if count is not None else nullcontext():
            scaled = self.scale_loss(loss, count=count)
            if not self._same_batches.is_over:
                self._same_batches.note(loss)
            scaled.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def clip_grad_norm(
        self,
        param_groups: Iterable[Any],
        max_norm: float,
        norm_type: float | str = 2,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Multiply all gradients by ``max_norm * loss_scale / (N + eps)`` if that is below 1;
        return ``N / loss_scale``.

        N is the p-norm (``norm_type`` p, ``"inf"`` for the largest magnitude), formed in float32,
        over the gradients of ``param_groups`` (a group of ``optimizer.param_groups`` or several, or
        parameters) of all ranks, replicas counted once. The result is a 0-dim tensor; nothing is
        read on the host. On every grid it is the norm that one process in plain torch would have;
        ``docs/migration.md`` says how BMTrain's differs. If N is not finite the gradients become
        NaN, which ``step`` detects.
        """
        p = float(norm_type)
        if not p > 0:
            raise ValueError(f"norm_type must be positive or 'inf', it is {norm_type!r}.")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, it is {max_norm!r}.")
        parameters = list(dict.fromkeys(parameters_in(param_groups)))
        everything = self._all_parameters()
        self._complete_gradients(list(dict.fromkeys([*everything, *parameters])))
        scale = self.loss_scale

        def scaling(factor: torch.Tensor) -> ExitStack:
            return self._scaling_gradients(parameters, factor)

        return clip(parameters, max_norm * scale, p, eps, device_of(everything), scaling) / scale

    @torch.no_grad()
    def unscaled_gradients(
        self, param_groups: Iterable[Any]
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return an iterator over the parameters that have a gradient, and copies of their
        gradients without the loss scale.

        ``param_groups`` are as for :meth:`clip_grad_norm`. The copies, made one by one, are in
        float32 or wider, and of a sharded parameter they are this rank's 1-D part. They are what
        plain torch computes for the mean loss over all data, clipped if they were clipped. Where
        the loss scale was too large they are infinite or NaN, as before a step that is skipped.
        Call it after the last ``backward`` and before :meth:`step`. Collective, as gradients of
        ordinary parameters are summed first.
        """
        parameters = list(dict.fromkeys(parameters_in(param_groups)))
        self._complete_gradients(list(dict.fromkeys([*self._all_parameters(), *parameters])))
        scale = self.loss_scale
        return (
            (p, p.grad.to(torch.promote_types(p.grad.dtype, torch.float32)) / scale)
            for p in parameters
            if p.grad is not None
        )

    @torch.no_grad()
    def step(self) -> None:
        """Step each optimizer and then its scheduler, unless a gradient is not finite: see
        the class. Raises :class:`ConfigError` if no optimizer was added.
        """
        if not self.optimizers:
            raise ConfigError(
                "This OptimManager has no optimizer, so step() would change no parameter. Call"
                " add_optimizer(optimizer) before the training."
            )
        self.read_outcome()
        if not self._same_batches.is_over:
            self._same_batches.compare()
        parameters = self._all_parameters()
        self._complete_gradients(parameters)
        with without_torch_functions():
            grads = [p.grad for p in parameters if p.grad is not None]
        device = device_of(parameters)
        flag, tokens = self._non_finite(grads, device), self._counts.divisor
        self._forget_gradients()
        if flag is not None and self._can_skip_on_device(flag):
            schedulers = [s for s in self.lr_schedulers if s is not None]
            self._outcome = HostFlag(flag), [(s, s.num_iter) for s in schedulers], tokens
            with self._scaling_gradients(parameters, None):
                kernels_for(grads, device).zero_if_(grads, flag)
            self._step_all(flag.reshape(()).float())
        elif flag is not None and flag.item():
            self._refuse(tokens)
        else:
            self._step_all(None)
            if self.loss_scale_enabled:
                self._change_scale(self._scale.after_step)

    def read_outcome(self) -> None:
        """Read whether the last step was skipped, and update scale and schedulers: see
        [Note: who reads the overflow flag].
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        for optimizer in self._managed:
            optimizer.read_outcome()
        skipped, schedulers, tokens = outcome
        if not skipped.read():
            self._change_scale(self._scale.after_step)
            return
        for scheduler, num_iter in schedulers:
            scheduler.step(num_iter)
        check_number(tokens)
        self._report_skip()

    def state_dict(
        self, gather_opt: bool = False, *, named_parameters: Named | None = None
    ) -> dict[str, Any]:
        """Return everything but the parameters that a resumed training needs to go on bit for bit.

        By default that is this rank's part, for the same rank at the same world size; nothing is
        communicated. With ``gather_opt`` the optimizer state is whole, by parameter name, loadable
        at any world size: collected on rank 0, tensor by tensor, and empty on all others;
        collective. Names come from ``named_parameters`` (``model.named_parameters()``), else from
        optimizers that were given names, else they are positions in the optimizers.
        """
        common = self._common_state()
        if gather_opt:
            return {**common, "logical": gathered_state(self._managed, named_parameters)}
        return {**common, **rank_state(self.optimizers)}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, named_parameters: Named | None = None
    ) -> None:
        """Take over a state that :meth:`state_dict` returned, with or without ``gather_opt``.
        Collective.

        Of a gathered state, rank 0 alone needs the contents. Raises :class:`CheckpointError` on
        every rank, with nothing changed, when the state does not fit: no dict, other numbers of
        optimizers, other shapes, or a rank's state at another world size.
        """
        self.read_outcome()
        with (
            collective_section(world(), "OptimManager.load_state_dict") as results,
            checking_form(),
        ):
            check_form(state_dict)
            is_gathered = results.own = "logical" in state_dict
            check_schedulers(self.lr_schedulers, state_dict["lr_schedulers"])
            scale = self._scale.loaded(state_dict)
            if not is_gathered:
                check_rank_state(self.optimizers, self._managed, state_dict)
        if len(set(results.of_ranks)) > 1:  # the same on every rank
            gathered = [rank for rank, has_gathered in enumerate(results.of_ranks) if has_gathered]
            raise CheckpointError(
                f"Ranks {gathered} of {world().size} pass a gathered state, and the others one"
                " rank's. Pass one kind on all ranks."
            )
        # Only after every rank has found its state in order does any rank change.
        if is_gathered:
            load_logical_state(self._managed, state_dict["logical"], named_parameters)
        else:
            with collective_section(world(), "OptimManager.load_state_dict"):
                load_rank_state(self.optimizers, self._managed, state_dict)
        for scheduler, saved in zip(self.lr_schedulers, state_dict["lr_schedulers"], strict=True):
            if scheduler is not None:
                scheduler.load_state_dict(saved)
        self._scheduler_steps.forget()
        self._scale = scale
        self.skipped_steps = state_dict.get("skipped_steps", 0)
        self._forget_gradients()

    def logical_state(self, named_parameters: Named | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint: ``state_dict(gather_opt=True)`` with parts in place of
        whole tensors. Collective.

        A :class:`~bmt_checkpoint.TensorPart` stands for each tensor of which this rank has a part;
        calling its ``value()`` gives its value at that time.
        """
        if not self._managed:
            warn_user(
                "This OptimManager has no optimizer, so the checkpoint gets no state of one."
                " add_optimizer(optimizer) before the training, or save without the manager."
            )
        return {**self._common_state(), "logical": logical_state(self._managed, named_parameters)}

    def load_logical_state(
        self, named_parameters: Named | None, state: Mapping[str, Any] | None
    ) -> None:
        """Take over what :meth:`logical_state` returned at any world size. Collective.

        Every rank passes it, or rank 0 alone and the others None. In place of each part the state
        has the whole tensor, or a :class:`~bmt_checkpoint.StoredTensor`.
        """
        self.load_state_dict(with_head_of_rank_0(state), named_parameters=named_parameters)

    def check_logical_state(
        self, named_parameters: Named | None, state: Mapping[str, Any] | None
    ) -> None:
        """Raise on every rank what :meth:`load_logical_state` would raise, and change nothing.
        Collective.
        """
        self.read_outcome()
        given = with_head_of_rank_0(state)
        with collective_section(world(), "checking the optimizer state"), checking_form():
            check_schedulers(self.lr_schedulers, given["lr_schedulers"])
            self._scale.loaded(given)
        check_logical_state(self._managed, given["logical"], named_parameters)

    def _common_state(self) -> dict[str, Any]:
        self.read_outcome()
        return {
            "lr_schedulers": [None if s is None else s.state_dict() for s in self.lr_schedulers],
            "skipped_steps": self.skipped_steps,
            **self._scale.state_dict(),
        }

    def _each_parameter(self) -> Iterator[torch.nn.Parameter]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        return list(dict.fromkeys(self._each_parameter()))

    @contextmanager
    def _counted_pass(self) -> Iterator[None]:
        """Surround the count of losses and their backward passes."""
        counted = self._counts.own
        try:
            yield
        except BaseException:
            self._counts.own = counted  # the program may give this loss again, or leave it out
            raise
        self._left_gradients = self._has_gradients()

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._each_parameter())

    def _complete_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        reduce_held_back(parameters)
        if self.sum_plain_gradients:
            divisor = gradient_divisor()
            has_scaled = _scaled_losses() != self._scaled_losses
            self._plain.sum(
                parameters, world(), divisor, divisor * self.grad_scale, has_scaled=has_scaled
            )
        self._counts.divide(parameters, self._scaling_gradients)

    def _set_scale(self, **settings: Any) -> None:
        self.read_outcome()  # the last step is judged by the settings that it was taken with
        self._scale = replace(self._scale, **settings)

    def _forget_gradients(self) -> None:
        """Treat the gradients that there are as those of the next step."""
        self._plain.forget()
        self._scaled_losses = _scaled_losses()
        self._counts.forget()
        self._left_gradients = False
        if not self._same_batches.is_over:
            self._same_batches.forget()

    def _scaling_gradients(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> ExitStack:
        """Enter :meth:`ManagedOptimizer.scaling_gradients` of all optimizers."""
        stack = ExitStack()
        for optimizer in self._managed:
            stack.enter_context(optimizer.scaling_gradients(parameters, factor))
        return stack

    def _non_finite(
        self, grads: Sequence[torch.Tensor], device: torch.device
    ) -> torch.Tensor | None:
        """Return a flag on the device, equal on all ranks: whether any gradient is not finite. None
        if nobody needs it.
        """
        if not self.loss_scale_enabled and self.non_finite == "ignore":
            return None
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        kernels_for(grads, device).has_non_finite(grads, flag)
        world().all_reduce(flag, "max").wait()
        return flag

    def _can_skip_on_device(self, flag: torch.Tensor) -> bool:
        if _is_on_host(flag) or (not self.loss_scale_enabled and self.non_finite == "raise"):
            return False
        return all(optimizer.skips_on_device for optimizer in self._managed) and all(
            s is None or isinstance(s, WarmupLRScheduler) for s in self.lr_schedulers
        )

    def _step_all(self, found_inf: torch.Tensor | None) -> None:
        """Step the optimizers, which skip on the device where ``found_inf`` is set, and
        the schedulers.
        """
        scale = 1 if self._scale.value is None else self._scale.value
        for optimizer, scheduler in zip(self._managed, self.lr_schedulers, strict=True):
            optimizer.step(scale=scale, found_inf=found_inf)
            if scheduler is not None:
                self._scheduler_steps.step(scheduler)

    def _change_scale(self, change: Callable[[], None]) -> None:
        """Call ``change``. If it has changed the scale, tell the optimizers that have
        ``_on_justify_scale``.
        """
        before = self._scale.value
        change()
        if before != self._scale.value:
            for optimizer in self.optimizers:
                if hasattr(optimizer, "_on_justify_scale"):
                    optimizer._on_justify_scale(before, self._scale.value)

    def _refuse(self, tokens: torch.Tensor | None) -> None:
        """Skip the step, because a gradient is not finite; or raise, if ``non_finite`` or the
        number of ``tokens`` says so.
        """
        check_number(tokens)
        if not self.loss_scale_enabled and self.non_finite == "raise":
            raise FloatingPointError(
                "A gradient is infinite or NaN on some rank. The step was not taken; the gradients"
                " are there to look at."
            )
        self.zero_grad()
        self._report_skip()

    def _report_skip(self) -> None:
        self.skipped_steps += 1
        before = self._scale.value
        self._change_scale(self._scale.after_overflow)
        if rank() != 0:
            return
        if before != self._scale.value:
            logger.info(
                "Gradient overflow: loss scale %g -> %g, step skipped.", before, self._scale.value
            )
            return
        at_minimum = "" if before is None else f" at the smallest loss scale ({before:g})"
        warn_user(
            f"A gradient is infinite or NaN{at_minimum}: step skipped ({self.skipped_steps}"
            " so far).",
            RuntimeWarning,
        )


def _scaled_losses() -> int:
    return current().state(ModelsOfRun).scaled_losses if is_initialized() else 0


def _is_on_host(flag: torch.Tensor) -> bool:
    return flag.device.type == "cpu"
