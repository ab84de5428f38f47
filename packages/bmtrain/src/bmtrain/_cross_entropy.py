"""``FusedCrossEntropy``: cross entropy without a float32 copy of the logits, over a whole or a
tensor-parallel vocabulary.

[Note: targets out of range]
A target outside the classes must be an error, and finding it must not stall the device. On the CPU
it raises at once. On CUDA no memory is touched for it; the loss of its row and the gradient of that
row's logits are NaN, so that ``OptimManager`` skips the step; and the module raises in the first
backward or forward pass that finds the flag on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bmt_core.comm.protocols import Group
from bmt_core.modules.first_derivatives import first_derivatives_only
from bmt_core.ops import HostFlag
from bmt_core.run.bmtrain_names import TENSOR_AXIS
from bmt_core.run.runtime import current, is_initialized
from bmt_core.run.same_data import Occasions, check_same
from bmtrain._loss_functions import kernels_for

_SAME_ROWS = (
    "With parallel=True each has a slice of the vocabulary for the same rows. Choose a rank's data"
    " by current().topology.data_rank and data_size; if each has rows of its own, gather the"
    " targets of all."
)


class FusedCrossEntropy(torch.nn.Module):
    """``torch.nn.CrossEntropyLoss`` of logits of any dtype as if they were float32, with only some
    rows in float32 at a time.

    Called with logits (N, C) and class indices (N,). For row i with target y, p = softmax(logits),
    e = ``label_smoothing``::

        loss_i = -(1 - e) * weight_y * log p_y - e / C * sum over c of weight_c * log p_c

    and 0 where y is ``ignore_index``. ``"none"`` returns the rows, ``"sum"`` their sum, ``"mean"``
    the sum over the sum of weight_y of the rows that count: NaN when there are none, as in torch.
    The result is float32 (float64 for float64 logits); the gradient has the logits' dtype.
    ``weight`` (C,) becomes a buffer.

    ``parallel``: the logits are this rank's slice (N, C / tp) of the vocabulary, in order of the tp
    ranks, with the same rows and targets on each; ``weight`` is that of the whole vocabulary. Every
    tp rank returns the same loss, and its gradient is that of its own slice. Collective over the tp
    group. In a run without tensor parallelism, and without a run, it changes nothing.

    A target out of range raises :class:`IndexError`, on CUDA in a later pass: see
    [Note: targets out of range]. Targets that differ between tp ranks raise ``ValueError`` on all
    of them; they are compared in the first calls and now and then. Each module counts its own
    calls, so make it once: one that is made in every forward compares in every step, and waits for
    the device.

    >>> loss = FusedCrossEntropy()
    >>> loss(torch.tensor([[0.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1]))
    tensor(0.6931)
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}.")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}.")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel
        self._alarms = _Alarms()
        self._occasions = Occasions()

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``logits`` (N, C) against the class indices ``target`` (N,)."""
        self._alarms.raise_if_set()
        vocabulary = self._vocabulary(logits)
        self._check(logits, target, vocabulary)
        target = target.detach().long()
        if vocabulary.group is not None and self._occasions.has_come():
            named = [("targets", target)]
            check_same(
                named,
                vocabulary.group,
                tolerance=0,
                what="targets of FusedCrossEntropy",
                advice=_SAME_ROWS,
            )
        is_ignored = target == self.ignore_index
        is_wrong = ~is_ignored & ((target < 0) | (target >= vocabulary.size))
        self._alarms.add(is_wrong, target, vocabulary.size)
        rows = _Rows(
            target,
            is_ignored,
            is_wrong,
            self.weight,
            self.label_smoothing,
            vocabulary,
            self._alarms,
        )
        losses: torch.Tensor = _CrossEntropy.apply(logits, rows)  # type: ignore[no-untyped-call]
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return losses.sum()
        return losses.sum() / rows.target_weight(losses.dtype).masked_fill(is_ignored, 0).sum()

    def extra_repr(self) -> str:
        """Show the options in ``repr``."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r},"
            f" label_smoothing={self.label_smoothing}, parallel={self.parallel}"
        )

    def _vocabulary(self, logits: torch.Tensor) -> _Vocabulary:
        classes = logits.shape[-1] if logits.dim() else 0
        if (
            not self.parallel
            or not is_initialized()
            or current().topology.axis_size(TENSOR_AXIS) == 1
        ):
            return _Vocabulary(classes, 0, None)
        group = current().topology.group((TENSOR_AXIS,))
        return _Vocabulary(classes * group.size, classes * group.rank, group)

    def _check(self, logits: torch.Tensor, target: torch.Tensor, vocabulary: _Vocabulary) -> None:
        if logits.dim() != 2 or target.shape != logits.shape[:1]:
            raise ValueError(
                f"Expected logits (N, C) and targets (N,), not {tuple(logits.shape)} and"
                f" {tuple(target.shape)}. Flatten them: logits.view(-1, logits.size(-1)),"
                " target.view(-1)."
            )
        if not logits.is_floating_point():
            raise TypeError(f"Logits must be of a floating-point dtype, not {logits.dtype}.")
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(
                f"Targets must be class indices of an integer dtype, not {target.dtype}."
            )
        if target.device != logits.device:
            raise ValueError(
                f"Logits are on {logits.device} and targets on {target.device}. Move one of them."
            )
        if vocabulary.size == 0:
            raise ValueError("Logits need at least one class.")
        if self.weight is not None and self.weight.shape != (vocabulary.size,):
            raise ValueError(
                f"weight must have one entry per class, ({vocabulary.size},), not"
                f" {tuple(self.weight.shape)}."
            )


@dataclass(frozen=True)
class _Vocabulary:
    """All classes, and where those of this rank's logits begin. ``group`` is None when this rank
    has all of them.
    """

    size: int
    first: int
    group: Group | None

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        if self.group is not None:
            self.group.all_reduce(tensor, op).wait()


@dataclass(frozen=True)
class _Rows:
    """All inputs of the rows' losses except the logits."""

    target: torch.Tensor
    is_ignored: torch.Tensor
    is_wrong: torch.Tensor
    weight: torch.Tensor | None
    label_smoothing: float
    vocabulary: _Vocabulary
    alarms: _Alarms

    def target_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight of each row's target, 1 without weights."""
        if self.weight is None:
            return torch.ones(self.target.shape, dtype=dtype, device=self.target.device)
        return self.weight.to(dtype)[self.target.clamp(0, self.vocabulary.size - 1)]

    def weight_sum(self, dtype: torch.dtype) -> torch.Tensor | int:
        """The sum of all classes' weights."""
        return self.vocabulary.size if self.weight is None else self.weight.to(dtype).sum()

    def own_weight(self, classes: int) -> torch.Tensor | None:
        """The weights of the classes that this rank's logits are for."""
        return None if self.weight is None else self.weight[self.vocabulary.first :][:classes]

    def mask(self, values: torch.Tensor) -> torch.Tensor:
        """Put 0 where the row is ignored and NaN where its target is out of range, in place."""
        return values.masked_fill_(self.is_ignored, 0).masked_fill_(self.is_wrong, math.nan)


class _CrossEntropy(torch.autograd.Function):
    """Losses of the rows. Saves the logits themselves and two or three numbers per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
        row_max, log_sum, target_log_prob, log_prob_sum = kernels_for(
            logits.device
        ).cross_entropy_forward(
            logits,
            rows.target,
            first_class=rows.vocabulary.first,
            weight=rows.own_weight(logits.shape[1]),
            with_sum=rows.label_smoothing > 0,
        )
        ctx.rows, ctx.share = rows, None
        if rows.vocabulary.group is not None:
            whole = _over_vocabulary(
                rows, logits.shape[1], row_max, log_sum, target_log_prob, log_prob_sum
            )
            ctx.share, target_log_prob, log_prob_sum = whole
        ctx.save_for_backward(logits, row_max, log_sum)
        losses = rows.target_weight(row_max.dtype).mul_(target_log_prob).neg_()
        if log_prob_sum is not None:
            e = rows.label_smoothing
            losses.mul_(1 - e).sub_(log_prob_sum, alpha=e / rows.vocabulary.size)
        return rows.mask(losses)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, row_max, log_sum = ctx.saved_tensors
        rows: _Rows = ctx.rows
        rows.alarms.raise_if_set()
        hit = grads[0] * rows.target_weight(row_max.dtype)
        total, spread = hit.clone(), None
        if rows.label_smoothing > 0:
            hit.mul_(1 - rows.label_smoothing)
            spread = rows.mask(grads[0] * (rows.label_smoothing / rows.vocabulary.size))
            total = hit + spread * rows.weight_sum(row_max.dtype)
        if ctx.share is not None:
            total.mul_(ctx.share)
        gradient = kernels_for(logits.device).cross_entropy_backward(
            logits,
            rows.target,
            row_max,
            log_sum,
            rows.mask(total),
            rows.mask(hit),
            spread,
            first_class=rows.vocabulary.first,
            weight=rows.own_weight(logits.shape[1]),
        )
        if ctx.share is not None:
            # A slice with only -inf (padding of the vocabulary) has no softmax of its own, and no
            # share of the whole row's.
            is_padding = (row_max == -math.inf) & (ctx.share == 0)
            gradient.masked_fill_(is_padding.unsqueeze(1), 0)
        return gradient, None


def _over_vocabulary(
    rows: _Rows,
    classes: int,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    target_log_prob: torch.Tensor,
    log_prob_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return this slice's share of the softmax, and log p of the target and the sum of all log p
    over the whole vocabulary.

    Two all-reduces: the largest logit M of each row; then the sums of exp(x - M), of x_target - M
    and, with label smoothing, of weight_c * (x_c - M), to each of which every rank adds the terms
    of its slice. Large logits cost no precision. Collective over the tp group.
    """
    largest = row_max.clone()
    rows.vocabulary.all_reduce(largest, "max")
    is_empty = row_max == -math.inf  # this slice of the row is padding; the whole row may be
    own_log_mass = (row_max - largest).masked_fill_(is_empty, -math.inf).add_(log_sum)
    column = rows.target - rows.vocabulary.first
    is_here = (column >= 0) & (column < classes)
    own = [
        own_log_mass.exp(),
        (target_log_prob + own_log_mass).masked_fill_(is_empty, -math.inf).where(is_here, 0),
    ]
    if log_prob_sum is not None:
        weight = rows.own_weight(classes)
        weight_sum = classes if weight is None else weight.to(own_log_mass).sum()
        own.append((log_prob_sum + own_log_mass * weight_sum).masked_fill_(is_empty, -math.inf))
    sums = torch.stack(own)
    rows.vocabulary.all_reduce(sums, "sum")
    log_mass = sums[0].log()
    if log_prob_sum is not None:
        log_prob_sum = sums[2] - log_mass * rows.weight_sum(log_mass.dtype)
    return own[0] / sums[0], sums[1] - log_mass, log_prob_sum


class _Alarms:
    """Flags of targets out of range that the host has not read yet: see
    [Note: targets out of range].
    """

    def __init__(self) -> None:
        self._pending: list[tuple[HostFlag, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Alarms:
        return _Alarms()

    def __reduce__(self) -> Any:
        return _Alarms, ()

    def add(self, is_wrong: torch.Tensor, target: torch.Tensor, classes: int) -> None:
        if is_wrong.device.type == "cpu":
            if is_wrong.any():
                found = int(target[is_wrong][0])
                raise IndexError(
                    f"Target {found} is out of bounds: there are {classes} classes, 0"
                    f" to {classes - 1}."
                )
        elif not torch.cuda.is_current_stream_capturing():
            self._pending.append((HostFlag(is_wrong.any()), classes))

    def raise_if_set(self) -> None:
        while self._pending and self._pending[0][0].is_known():
            flag, classes = self._pending.pop(0)
            if flag.read():
                self._pending.clear()
                raise IndexError(
                    f"A target in an earlier pass was out of bounds: there are {classes} classes, 0"
                    f" to {classes - 1}. The loss of its row was NaN."
                )
