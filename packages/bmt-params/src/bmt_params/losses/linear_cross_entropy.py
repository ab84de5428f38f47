"""``linear_cross_entropy``: the cross entropy of a linear layer's output, which never exists as
a whole.

[Note: gradients in forward]
The rows are taken in chunks. A chunk's logits are computed, their gradient takes their place, and
the products with it are added to the gradients of hidden states, weight and bias: all in forward,
so that the logits are not computed a second time (Hsu et al. 2024, "Liger Kernel", section 3.2).
Forward cannot know the gradient of the loss. So these are the gradients of the *sum* of the losses,
kept in float32, and backward multiplies them by the sum's gradient and rounds them once, as one
product over all rows is rounded once. A mean is the sum, divided outside of this function. The
losses of ``reduction="none"`` have a gradient each; backward takes the chunks again for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.ops.reference.cross_entropy import computation_dtype
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import never_compiled
from bmt_params.guards.first_derivatives import first_derivatives_only
from bmt_params.guards.same_data import Occasions, check_same
from bmt_params.losses.cross_entropy_rows import (
    SAME_ROWS,
    Reduction,
    Rows,
    TargetAlarms,
    Vocabulary,
    check_options,
    check_targets,
    rows_of,
)

CHUNK_BYTES = 1 << 30
"""The most bytes of a chunk's logits, unless one row has more. Each chunk reads and writes the
whole gradient of the weight, in float32: smaller ones make large vocabularies slower.
"""

_Gradients = list[torch.Tensor | None]  # of hidden states, weight and bias

# Of the whole process: the function has no module to keep them.
_alarms = TargetAlarms()


@never_compiled
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    parallel: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of ``linear(hidden, weight, bias)`` against ``targets`` without the
    whole logits: no more than 1 GiB of them exist at a time, in forward and in backward.

    ``hidden`` is (..., H), ``weight`` (C, H), ``bias`` (C,), of one floating-point dtype or under
    autocast, and ``targets`` (...) are class indices. The logits x have that dtype and their loss
    is computed in float32, as by ``FusedCrossEntropy``; with ``soft_cap`` they are float32, and
    become soft_cap * tanh(x / soft_cap). With e = ``label_smoothing``, p = softmax(x)::

        loss_i = -(1 - e) * log p_y - e / C * sum over c of log p_c
                 + z_loss * (log of the sum over c of exp(x_c)) ** 2

    and 0 where y is ``ignore_index``. ``"none"`` returns the losses in the shape of ``targets``,
    ``"sum"`` their sum, ``"mean"`` the mean over the rows of this rank that count: NaN when there
    are none. The result is float32 (float64 for float64).

    Gradients are rounded once, from sums in float32. The sum and the mean compute them in forward
    and keep them until backward, 4 bytes for each element of ``hidden`` and ``weight`` that require
    gradients: see [Note: gradients in forward].

    ``parallel``: ``weight`` and ``bias`` are this rank's slice of the vocabulary, in order of the
    tp ranks; ``hidden`` and ``targets`` are the same on each, and so are the loss and the gradient
    of ``hidden``. Collective over the tp group. Without tensor parallelism it changes nothing.

    A sharded weight is whole where it is read from its module, ``model.head.weight``: inside of the
    model's forward without a gather of its own.

    Raises :class:`IndexError` for a target out of range, on CUDA in a later pass;
    ``ValueError`` for shapes that do not fit, and on all tp ranks for targets that differ;
    ``TypeError`` for dtypes.

    >>> linear_cross_entropy(torch.zeros(1, 3), torch.ones(2, 3), torch.tensor([1]))
    tensor(0.6931)
    """
    check_options(reduction, label_smoothing)
    _check(hidden, weight, targets, bias, soft_cap)
    _alarms.raise_if_set()
    vocabulary = Vocabulary.of(len(weight), parallel=parallel)
    if vocabulary.group is not None and current().state(_Comparisons).occasions.has_come():
        named = [("targets", targets.detach())]
        what = "targets of linear_cross_entropy"
        check_same(named, vocabulary.group, tolerance=0, what=what, advice=SAME_ROWS)
    rows = rows_of(
        targets.reshape(-1),
        vocabulary,
        _alarms,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    kind = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    elif not hidden.dtype == weight.dtype == (weight if bias is None else bias).dtype:
        raise TypeError(
            f"hidden is {hidden.dtype} and the weight or bias {weight.dtype}. Convert one of them,"
            " or compute under torch.autocast."
        )
    head = _Head(rows, dtype, soft_cap, is_summed=reduction != "none")
    # Whether gradients are recorded is an argument: torch switches grad mode off in forward.
    found: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, head, torch.is_grad_enabled()
    )
    return rows.reduced(found, reduction) if head.is_summed else found.view(targets.shape)


class _Comparisons:
    """When a run compares the targets of ranks along ``tp``."""

    def __init__(self, runtime: Runtime) -> None:
        self.occasions = Occasions()


@dataclass(frozen=True)
class _Head:
    """The layer and its loss without their tensors. Products are computed in ``dtype``."""

    rows: Rows
    dtype: torch.dtype
    soft_cap: float | None
    is_summed: bool

    def losses(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        needed: tuple[bool, ...] = (False, False, False),
        upstream: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, _Gradients]:
        """Return the losses (N,), and those gradients of the sum of ``upstream`` * losses that are
        ``needed``; ``upstream`` is 1 by default. Collective over the vocabulary's group.
        """
        sums: _Gradients = [
            torch.zeros(tensor.shape, dtype=computation_dtype(self.dtype), device=tensor.device)
            if need and tensor is not None
            else None
            for need, tensor in zip(needed, (hidden, weight, bias), strict=True)
        ]
        weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        losses = hidden.new_empty(len(hidden), dtype=computation_dtype(self.dtype))
        for part in self._chunks(len(hidden), len(weight)):
            rows, own = self.rows.part(part), hidden[part].to(self.dtype)
            logits = self._logits(own, weight, bias)
            found = rows.losses_of(logits)
            losses[part] = found.losses
            if True in needed:
                factor = torch.ones_like(found.losses) if upstream is None else upstream[part]
                # Without a soft cap the gradient takes the place of the logits.
                out = logits if self.soft_cap is None else None
                grad = self._uncapped(logits, rows.gradient_of(logits, found, factor, out))
                del logits, out
                _add_products(sums, part, grad, own, weight)
        if sums[0] is not None:
            # Each rank has the terms of its classes.
            self.rows.vocabulary.all_reduce(sums[0], "sum")
        return losses, sums

    def _chunks(self, count: int, classes: int) -> Iterator[slice]:
        wide = 4 * self.dtype.itemsize if self.soft_cap is not None else self.dtype.itemsize
        most = max(1, CHUNK_BYTES // (classes * wide))
        chunks = max(1, -(-count // most))
        step = max(1, -(-count // chunks))  # chunks of about the same size
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.soft_cap is None:
            return torch.nn.functional.linear(hidden, weight, bias)
        logits = hidden.new_zeros((len(hidden), len(weight)), dtype=computation_dtype(self.dtype))
        _add_product(logits, hidden, weight.t())
        if bias is not None:
            logits += bias
        return logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def _uncapped(self, logits: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits before the cap. ``logits`` are overwritten."""
        if self.soft_cap is None:
            return gradient
        slope = logits.div_(self.soft_cap).square_().neg_().add_(1)
        return gradient.mul_(slope).to(self.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """(hidden, weight, bias) -> the sum of the losses, or the losses (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: _Head,
        has_graph: bool,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad[:3] if has_graph and head.is_summed else (False,) * 3
        # The head has chosen the dtype of its products by now.
        with torch.autocast(hidden.device.type, enabled=False):
            losses, sums = head.losses(hidden, weight, bias, needed=needed)
        ctx.head = head
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*(sums if head.is_summed else (hidden, weight, bias)))
        return losses.sum() if head.is_summed else losses

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        _alarms.raise_if_set()
        head, factor = ctx.head, None
        if head.is_summed:
            sums = ctx.saved_tensors
            # The mean of no rows has an infinite gradient, which reaches nothing.
            factor = grads[0].masked_fill(head.rows.is_ignored.all(), 0)
        else:
            with torch.autocast(grads[0].device.type, enabled=False):
                _, sums = head.losses(
                    *ctx.saved_tensors, needed=ctx.needs_input_grad[:3], upstream=grads[0]
                )
        rounded = (
            None if total is None else _rounded(total, factor, dtype)
            for total, dtype in zip(sums, ctx.dtypes, strict=True)
        )
        return (*rounded, None, None)


def _rounded(total: torch.Tensor, factor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if factor is None:
        return total.to(dtype)
    # Rounded as it is written, in one pass over the memory.
    return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def _add_products(
    sums: _Gradients, part: slice, grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> None:
    """Add what ``grad``, the gradient of the logits of the rows ``part``, makes of the gradients of
    hidden states, weight and bias.
    """
    for_hidden, for_weight, for_bias = sums
    if for_hidden is not None:
        _add_product(for_hidden[part], grad, weight)
    if for_weight is not None:
        _add_product(for_weight, grad.t(), hidden)
    if for_bias is not None:
        for_bias += grad.sum(0, dtype=for_bias.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the product of ``a`` and ``b`` to ``total`` without rounding it to their dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch has wide products of half types on CUDA only
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    soft_cap: float | None,
) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Expected hidden (..., H) and weight (C, H), not {tuple(hidden.shape)} and"
            f" {tuple(weight.shape)}. A sharded weight is whole where it is read from its module:"
            " model.head.weight."
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"Expected one target for each of the hidden states {tuple(hidden.shape[:-1])}, not"
            f" {tuple(targets.shape)}."
        )
    if len(weight) == 0:
        raise ValueError("weight needs at least one class.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"Expected bias ({len(weight)},), not {tuple(bias.shape)}.")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden must be of a floating-point dtype, not {hidden.dtype}.")
    if weight.device != hidden.device:  # a loss of meta tensors has no value
        raise ValueError(f"hidden is on {hidden.device}, and weight on {weight.device}. Move one.")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(
            f"soft_cap must be positive and finite, not {soft_cap}; None caps nothing."
        )
    check_targets(targets, hidden.device, "Hidden states are")
