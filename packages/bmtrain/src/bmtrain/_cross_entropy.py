"""``FusedCrossEntropy``: cross entropy without a float32 copy of the logits, over a whole or a
tensor-parallel vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_params.guards.first_derivatives import first_derivatives_only
from bmt_params.guards.same_data import Occasions, check_same
from bmt_params.losses.cross_entropy_rows import (
    SAME_ROWS,
    Reduction,
    RowLosses,
    Rows,
    TargetAlarms,
    Vocabulary,
    check_options,
    check_targets,
    rows_of,
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

    A target out of range raises :class:`IndexError`, on CUDA in a later pass: see [Note: targets
    out of range] in bmt_params/losses/cross_entropy_rows.py. Targets that differ between tp ranks
    raise ``ValueError`` on all of them; they are compared in the first calls and now and then. Each
    module counts its own calls, so make it once: one that is made in every forward compares in
    every step, and waits for the device.

    >>> loss = FusedCrossEntropy()
    >>> loss(torch.tensor([[0.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1]))
    tensor(0.6931)
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.parallel = parallel
        self._alarms = TargetAlarms()
        self._occasions = Occasions()

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``logits`` (N, C) against the class indices ``target`` (N,)."""
        self._alarms.raise_if_set()
        vocabulary = Vocabulary.of(logits.shape[-1] if logits.dim() else 0, parallel=self.parallel)
        self._check(logits, target, vocabulary)
        if vocabulary.group is not None and self._occasions.has_come():
            named = [("targets", target.detach().long())]
            what = "targets of FusedCrossEntropy"
            check_same(named, vocabulary.group, tolerance=0, what=what, advice=SAME_ROWS)
        rows = rows_of(
            target,
            vocabulary,
            self._alarms,
            ignore_index=self.ignore_index,
            weight=self.weight,
            label_smoothing=self.label_smoothing,
        )
        losses: torch.Tensor = _CrossEntropy.apply(logits, rows, self._alarms)  # type: ignore[no-untyped-call]
        return rows.reduced(losses, self.reduction)

    def extra_repr(self) -> str:
        """Show the options in ``repr``."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r},"
            f" label_smoothing={self.label_smoothing}, parallel={self.parallel}"
        )

    def _check(self, logits: torch.Tensor, target: torch.Tensor, vocabulary: Vocabulary) -> None:
        if logits.dim() != 2 or target.shape != logits.shape[:1]:
            raise ValueError(
                f"Expected logits (N, C) and targets (N,), not {tuple(logits.shape)} and"
                f" {tuple(target.shape)}. Flatten them: logits.view(-1, logits.size(-1)),"
                " target.view(-1)."
            )
        if not logits.is_floating_point():
            raise TypeError(f"Logits must be of a floating-point dtype, not {logits.dtype}.")
        check_targets(target, logits.device, "Logits are")
        if vocabulary.size == 0:
            raise ValueError("Logits need at least one class.")
        if self.weight is not None and self.weight.shape != (vocabulary.size,):
            raise ValueError(
                f"weight must have one entry per class, ({vocabulary.size},), not"
                f" {tuple(self.weight.shape)}."
            )


class _CrossEntropy(torch.autograd.Function):
    """Losses of the rows. Saves the logits themselves and a few numbers per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: Rows, alarms: TargetAlarms) -> torch.Tensor:
        losses, *numbers = rows.losses_of(logits)
        ctx.rows, ctx.alarms = rows, alarms
        ctx.save_for_backward(logits, *numbers)
        return losses

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, *numbers = ctx.saved_tensors
        ctx.alarms.raise_if_set()
        found = RowLosses(grads[0], *numbers)
        return ctx.rows.gradient_of(logits, found, grads[0]), None, None
