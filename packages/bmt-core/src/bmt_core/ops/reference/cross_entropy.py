"""Cross entropy of the rows of a matrix of logits, with no more than some rows in float32 at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Float32 elements per temporary tensor: on the CPU so many as its cache holds, elsewhere enough to
# occupy the device.
MAX_ELEMENTS = {"cpu": 1 << 18}
MAX_ELEMENTS_ELSEWHERE = 1 << 25
# For half types at least this many chunks, so that even a small matrix is never in float32 as
# a whole.
MIN_CHUNKS = 8


@torch.no_grad()
def cross_entropy_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    first_class: int = 0,
    weight: torch.Tensor | None = None,
    with_sum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return for each row (N,) the numbers that make up the loss, in float32 (float64 for
    float64 logits).

    ``logits`` (N, C), of any strides, are the classes ``first_class`` to ``first_class + C - 1``;
    ``target`` (N,) is int64. With log p = log softmax of the row, over the classes given::

        row_max           the largest logit
        log_sum           log of the sum over c of exp(x_c - row_max); -inf where row_max is
        target_log_prob   log p of the target; 0 if it is not one of these classes (nothing is read)
        log_prob_sum      sum over c of weight_c * log p_c (weight (C,) or 1); None unless with_sum
    """
    _check(logits, target)
    dtype = computation_dtype(logits.dtype)
    row_max, log_sum, target_log_prob, log_prob_sum = torch.empty(
        (4, len(logits)), dtype=dtype, device=logits.device
    )
    column, is_here = _columns(target, first_class, logits.shape[1])
    weight = None if weight is None else weight.to(dtype)
    for rows in _chunks(logits):
        largest, position = logits[rows].max(dim=1, keepdim=True)
        log_prob = torch.log_softmax(logits[rows], dim=1, dtype=dtype)
        row_max[rows] = largest.squeeze(1)
        log_sum[rows] = log_prob.gather(1, position).squeeze(1)
        target_log_prob[rows] = log_prob.gather(1, column[rows]).squeeze(1)
        if with_sum:
            log_prob_sum[rows] = (log_prob if weight is None else log_prob.mul_(weight)).sum(dim=1)
    log_sum.neg_().masked_fill_(row_max == -math.inf, -math.inf)
    target_log_prob.masked_fill_(~is_here, 0)
    return row_max, log_sum, target_log_prob, log_prob_sum if with_sum else None


@torch.no_grad()
def cross_entropy_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    total: torch.Tensor,
    hit: torch.Tensor,
    spread: torch.Tensor | None,
    *,
    first_class: int = 0,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits, in their dtype and layout. It is written to ``out``, which
    may be the logits themselves; no other argument is overwritten.

    With p = softmax of the row over the classes given, and one coefficient per row (N,)::

        gradient_c = total * p_c - hit * [c is the target] - spread * weight_c

    ``row_max`` and ``log_sum`` are those of the forward pass: with p_c = exp(x_c - row_max -
    log_sum) one pass over the logits suffices.
    """
    _check(logits, target)
    if out is not None and (out.shape, out.dtype) != (logits.shape, logits.dtype):
        raise ValueError(
            f"out must be {tuple(logits.shape)} {logits.dtype} like the logits, not"
            f" {tuple(out.shape)} {out.dtype}."
        )
    del log_sum  # torch's softmax computes it again
    grad = torch.empty_like(logits) if out is None else out
    column, is_here = _columns(target, first_class, logits.shape[1])
    at_target = hit.neg().masked_fill_(~is_here, 0).unsqueeze(1)
    weight = None if weight is None else weight.to(row_max.dtype)
    for rows in _chunks(logits):
        values = torch.softmax(logits[rows], dim=1, dtype=row_max.dtype).mul_(
            total[rows].unsqueeze(1)
        )
        if spread is not None and weight is None:
            values.sub_(spread[rows].unsqueeze(1))
        elif spread is not None and weight is not None:
            values.addcmul_(spread[rows].unsqueeze(1), weight, value=-1)
        values.scatter_add_(1, column[rows], at_target[rows])
        grad[rows] = values
    return grad


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the loss of ``dtype`` logits is formed: float32 for anything narrower."""
    return torch.promote_types(dtype, torch.float32)


def _check(logits: torch.Tensor, target: torch.Tensor) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (N, C), not {tuple(logits.shape)}.")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be of a floating-point dtype, not {logits.dtype}.")
    if target.shape != logits.shape[:1]:
        raise ValueError(
            f"target must have shape {tuple(logits.shape[:1])}, not {tuple(target.shape)}."
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target must be of dtype torch.int64, not {target.dtype}.")


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    count, classes = logits.shape
    step = max(1, MAX_ELEMENTS.get(logits.device.type, MAX_ELEMENTS_ELSEWHERE) // classes)
    if logits.dtype.itemsize < 4:
        step = max(1, min(step, -(-count // MIN_CHUNKS)))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _columns(
    target: torch.Tensor, first_class: int, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    column = target - first_class
    is_here = (column >= 0) & (column < classes)
    return column.clamp(0, classes - 1).unsqueeze(1), is_here
