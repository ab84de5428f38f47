"""Further operations on logits: softmax over a split vocabulary, and cross entropy's gradient
written in place.

Softmax over a vocabulary that is split between ranks takes three steps with a reduction after each
of the first two. For logits x of a slice of the vocabulary, per row::

    largest = row_max(x)                     then the maximum over ranks
    mass = sum_exp(x, largest)               then the sum over ranks
    softmax_(x, largest, mass.log())         x becomes this slice of the softmax

A loss needs one pass less, because ``cross_entropy_forward`` computes the maximum and the sum of a
slice together.
"""

from __future__ import annotations

import math

import torch

from bmt_core.ops import REFERENCE
from bmt_kernels.checks import check_device, check_dtype, check_shape
from bmt_kernels.cross_entropy import write_gradient
from bmt_kernels.provider import kernels_on


@torch.no_grad()
def row_max(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row (N,) of ``logits`` (N, C), in float32 (float64
    for float64).

    >>> row_max(torch.tensor([[1.0, 3.0], [2.0, -1.0]]))
    tensor([3., 2.])
    """
    return _forward(logits)[0]


@torch.no_grad()
def sum_exp(logits: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """Return the sum over c of exp(x_c - row_max) for each row (N,); 0 where all of a row is -inf.

    >>> sum_exp(torch.tensor([[0.0, -math.inf]]), torch.tensor([1.0]))
    tensor([0.3679])
    """
    own_max, log_sum = _forward(logits)
    _check_row("row_max", row_max, logits, own_max.dtype)
    return (own_max - row_max + log_sum).exp_().masked_fill_(own_max == -math.inf, 0)


@torch.no_grad()
def softmax_(logits: torch.Tensor, row_max: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """Replace ``logits`` (N, C) by exp(x - row_max - log_sum), rounded to their dtype, and
    return them.

    >>> softmax_(torch.zeros(1, 2), torch.zeros(1), torch.full((1,), 2.0).log())
    tensor([[0.5000, 0.5000]])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for name, factor in (("row_max", row_max), ("log_sum", log_sum)):
        _check_row(name, factor, logits, dtype)
    kernels = kernels_on(logits.device)
    factors = [row_max, log_sum, torch.ones_like(row_max), torch.zeros_like(row_max), None]
    if kernels is None or not write_gradient(kernels, logits, _no_target(logits), factors, logits):
        # Not the reference of the backward pass, which takes the given classes for the
        # whole vocabulary.
        logits.copy_((logits.to(dtype) - row_max.unsqueeze(1) - log_sum.unsqueeze(1)).exp_())
    return logits


@torch.no_grad()
def cross_entropy_backward_(
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
) -> torch.Tensor:
    """Like :func:`bmt_core.ops.reference.cross_entropy_backward`, but write the gradient into
    ``logits`` and return them.

    Each logit is read once and written once. Nobody, autograd included, may need the old
    logits afterwards.

    >>> x, target, one = torch.zeros(1, 2), torch.tensor([0]), torch.ones(1)
    >>> log_sum = torch.full((1,), 2.0).log()
    >>> cross_entropy_backward_(x, target, torch.zeros(1), log_sum, one, one, None)
    tensor([[-0.5000,  0.5000]])
    """
    kernels = kernels_on(logits.device) or REFERENCE
    factors = (row_max, log_sum, total, hit, spread)
    return kernels.cross_entropy_backward(
        logits, target, *factors, first_class=first_class, weight=weight, out=logits
    )


def _forward(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    forward = (kernels_on(logits.device) or REFERENCE).cross_entropy_forward
    largest, log_sum, _, _ = forward(logits, _no_target(logits))
    return largest, log_sum


def _no_target(logits: torch.Tensor) -> torch.Tensor:
    return torch.full(logits.shape[:1], -1, dtype=torch.int64, device=logits.device)


def _check_row(name: str, row: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> None:
    check_shape(name, row, logits.shape[:1])
    check_dtype(name, row, dtype)
    check_device(name, row, logits.device)
