"""Losses of rows of logits and their gradients, over a whole or a tensor-parallel vocabulary.

[Note: targets out of range]
A target outside the classes must be an error, and finding it must not stall the device. On the CPU
it raises at once. On CUDA no memory is touched for it; the loss of its row and the gradient of that
row's logits are NaN, so that ``OptimManager`` skips the step; and the loss raises in the first
backward or forward pass that finds the flag on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch

from bmt_core.comm.protocols import Group
from bmt_core.ops import REFERENCE, HostFlag, Kernels
from bmt_core.run.bmtrain_names import TENSOR_AXIS
from bmt_core.run.runtime import current, is_initialized

Reduction = Literal["mean", "sum", "none"]
SAME_ROWS = (
    "With parallel=True each has a slice of the vocabulary for the same rows. Choose a rank's data"
    " by current().topology.data_rank and data_size; if each has rows of its own, gather the"
    " targets of all."
)
"""The advice of errors about targets that differ along ``tp``."""


@dataclass(frozen=True)
class Vocabulary:
    """All classes, and where those of this rank's logits begin. ``group`` is None when this rank
    has all of them.
    """

    size: int
    first: int
    group: Group | None

    @classmethod
    def of(cls, classes: int, *, parallel: bool) -> Self:
        """Return the vocabulary of which this rank's logits are ``classes`` classes: a slice of it
        if ``parallel`` and the run has tensor parallelism.
        """
        if not parallel or not is_initialized() or current().topology.axis_size(TENSOR_AXIS) == 1:
            return cls(classes, 0, None)
        group = current().topology.group((TENSOR_AXIS,))
        return cls(classes * group.size, classes * group.rank, group)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Combine ``tensor`` of all ranks that have a slice, in place. Collective over them."""
        if self.group is not None:
            self.group.all_reduce(tensor, op).wait()


class RowLosses(NamedTuple):
    """The losses of rows (N,), and what their gradient needs beside the logits, each (N,)."""

    losses: torch.Tensor
    row_max: torch.Tensor
    log_sum: torch.Tensor
    log_total: torch.Tensor  # log of the sum of exp(x) over the whole vocabulary
    share: torch.Tensor | None  # of this slice in that sum; None if this rank has all classes


@dataclass(frozen=True)
class Rows:
    """All inputs of the rows' losses except the logits. For row i with target y, p = softmax(x) and
    e = ``label_smoothing``::

        loss_i = -(1 - e) * weight_y * log p_y - e / C * sum over c of weight_c * log p_c
                 + z_loss * (log of the sum over c of exp(x_c)) ** 2
    """

    target: torch.Tensor
    is_ignored: torch.Tensor
    is_wrong: torch.Tensor
    vocabulary: Vocabulary
    weight: torch.Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def part(self, rows: slice) -> Rows:
        """Return some of the rows."""
        return replace(
            self,
            target=self.target[rows],
            is_ignored=self.is_ignored[rows],
            is_wrong=self.is_wrong[rows],
        )

    def losses_of(self, logits: torch.Tensor) -> RowLosses:
        """Return the losses for ``logits`` (N, C), in float32 (float64 for float64 logits).
        Collective over the vocabulary's group.
        """
        row_max, log_sum, target_log_prob, log_prob_sum = kernels_for(
            logits.device
        ).cross_entropy_forward(
            logits,
            self.target,
            first_class=self.vocabulary.first,
            weight=self._own_weight(logits.shape[1]),
            with_sum=self.label_smoothing > 0,
        )
        log_total, share = row_max + log_sum, None
        if self.vocabulary.group is not None:
            log_total, share, target_log_prob, log_prob_sum = self._over_vocabulary(
                logits.shape[1], row_max, log_sum, target_log_prob, log_prob_sum
            )
        losses = self.target_weight(row_max.dtype).mul_(target_log_prob).neg_()
        if log_prob_sum is not None:
            e = self.label_smoothing
            losses.mul_(1 - e).sub_(log_prob_sum, alpha=e / self.vocabulary.size)
        if self.z_loss:
            losses.addcmul_(log_total, log_total, value=self.z_loss)
        return RowLosses(self._masked(losses), row_max, log_sum, log_total, share)

    def gradient_of(
        self,
        logits: torch.Tensor,
        found: RowLosses,
        upstream: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the sum of ``upstream`` (N,) * losses with respect to ``logits``,
        of which :meth:`losses_of` returned ``found``.

        It is written to ``out``, which may be the logits.
        """
        hit = upstream * self.target_weight(found.row_max.dtype)
        total, spread = hit.clone(), None
        if self.label_smoothing > 0:
            hit.mul_(1 - self.label_smoothing)
            spread = self._masked(upstream * (self.label_smoothing / self.vocabulary.size))
            total = hit + spread * self._weight_sum(found.row_max.dtype)
        if self.z_loss:
            total.addcmul_(upstream, found.log_total, value=2 * self.z_loss)
        if found.share is not None:
            # The kernel takes the softmax of the slice: times its share it is that of the row.
            total.mul_(found.share)
        gradient = kernels_for(logits.device).cross_entropy_backward(
            logits,
            self.target,
            found.row_max,
            found.log_sum,
            self._masked(total),
            self._masked(hit),
            spread,
            first_class=self.vocabulary.first,
            weight=self._own_weight(logits.shape[1]),
            out=out,
        )
        if found.share is not None:
            # A slice with only -inf (padding of the vocabulary) has no softmax of its own, and no
            # share of the whole row's.
            is_padding = (found.row_max == -math.inf) & (found.share == 0)
            gradient.masked_fill_(is_padding.unsqueeze(1), 0)
        return gradient

    def reduced(self, losses: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Return ``losses``, or the sum of losses, reduced: the mean is over the target weights of
        rows that count.
        """
        if reduction != "mean":
            return losses if reduction == "none" else losses.sum()
        return losses.sum() / self.target_weight(losses.dtype).masked_fill(self.is_ignored, 0).sum()

    def target_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of each row's target, 1 without weights."""
        if self.weight is None:
            return torch.ones(self.target.shape, dtype=dtype, device=self.target.device)
        # Ignored targets and those out of range read some weight; their rows are masked later.
        return self.weight.to(dtype)[self.target.clamp(0, self.vocabulary.size - 1)]

    def _weight_sum(self, dtype: torch.dtype) -> torch.Tensor | int:
        return self.vocabulary.size if self.weight is None else self.weight.to(dtype).sum()

    def _own_weight(self, classes: int) -> torch.Tensor | None:
        """The weights of the classes that this rank's logits are for."""
        return None if self.weight is None else self.weight[self.vocabulary.first :][:classes]

    def _masked(self, values: torch.Tensor) -> torch.Tensor:
        """Put 0 where the row is ignored and NaN where its target is out of range, in place."""
        return values.masked_fill_(self.is_ignored, 0).masked_fill_(self.is_wrong, math.nan)

    def _over_vocabulary(
        self,
        classes: int,
        row_max: torch.Tensor,
        log_sum: torch.Tensor,
        target_log_prob: torch.Tensor,
        log_prob_sum: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the log of the sum of exp(x), this slice's share of it, log p of the target and
        the sum of all log p, over the whole vocabulary.

        Two all-reduces: the largest logit M of each row; then the sums of exp(x - M), of x_target -
        M and, with label smoothing, of weight_c * (x_c - M), to each of which every rank adds the
        terms of its slice. Large logits cost no precision. Collective over the tp group.
        """
        largest = row_max.clone()
        self.vocabulary.all_reduce(largest, "max")
        is_empty = row_max == -math.inf  # this slice of the row is padding; the whole row may be
        # Where the whole row is padding, the difference of two infinities is NaN.
        own_log_mass = (row_max - largest).masked_fill_(is_empty, -math.inf).add_(log_sum)
        column = self.target - self.vocabulary.first
        is_here = (column >= 0) & (column < classes)
        own = [
            own_log_mass.exp(),
            (target_log_prob + own_log_mass).masked_fill_(is_empty, -math.inf).where(is_here, 0),
        ]
        if log_prob_sum is not None:
            weight = self._own_weight(classes)
            weight_sum = classes if weight is None else weight.to(own_log_mass).sum()
            own.append((log_prob_sum + own_log_mass * weight_sum).masked_fill_(is_empty, -math.inf))
        sums = torch.stack(own)
        self.vocabulary.all_reduce(sums, "sum")
        log_mass = sums[0].log()
        if log_prob_sum is not None:
            log_prob_sum = sums[2] - log_mass * self._weight_sum(log_mass.dtype)
        return largest + log_mass, own[0] / sums[0], sums[1] - log_mass, log_prob_sum


class TargetAlarms:
    """Flags of targets out of range that the host has not read yet: see
    [Note: targets out of range].
    """

    def __init__(self) -> None:
        self._pending: list[tuple[HostFlag, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetAlarms:
        return TargetAlarms()

    def __reduce__(self) -> Any:
        return TargetAlarms, ()

    def add(self, is_wrong: torch.Tensor, target: torch.Tensor, classes: int) -> None:
        """Raise :class:`IndexError` if ``is_wrong`` is true anywhere; on CUDA later."""
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
        """Raise :class:`IndexError` if a flag is set that the host can read without waiting."""
        while self._pending and self._pending[0][0].is_known():
            flag, classes = self._pending.pop(0)
            if flag.read():
                self._pending.clear()
                raise IndexError(
                    f"A target in an earlier pass was out of bounds: there are {classes} classes, 0"
                    f" to {classes - 1}. The loss of its row was NaN."
                )


def rows_of(
    target: torch.Tensor,
    vocabulary: Vocabulary,
    alarms: TargetAlarms,
    *,
    ignore_index: int,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Rows:
    """Return the rows of ``target`` (N,), class indices of an integer dtype. See
    [Note: targets out of range].
    """
    target = target.detach().long()
    is_ignored = target == ignore_index
    is_wrong = ~is_ignored & ((target < 0) | (target >= vocabulary.size))
    alarms.add(is_wrong, target, vocabulary.size)
    return Rows(target, is_ignored, is_wrong, vocabulary, weight, label_smoothing, z_loss)


def check_options(reduction: str, label_smoothing: float) -> None:
    """Raise ``ValueError`` for a reduction that does not exist or a smoothing out of range."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}.")


def check_targets(target: torch.Tensor, device: torch.device, of: str) -> None:
    """Raise unless ``target`` has class indices on ``device``, where ``of`` are."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"Targets must be class indices of an integer dtype, not {target.dtype}.")
    if target.device != device:
        raise ValueError(f"{of} on {device} and targets on {target.device}. Move one of them.")


def kernels_for(device: torch.device) -> Kernels:
    """Return the run's kernels if they serve ``device``, otherwise (or without a run) the
    plain-torch reference.
    """
    return current().kernels.on(device) if is_initialized() else REFERENCE
