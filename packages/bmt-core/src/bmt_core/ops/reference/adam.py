"""Adam (Kingma and Ba 2015, Algorithm 1), with the decay of AdamW (Loshchilov and Hutter 2019, Algorithm 2) if asked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bmt_core.ops import remainder
from bmt_core.ops.reference.adam_fused import update_fused
from bmt_core.ops.reference.adam_rows import Row, Settings, batches, groups

# Bounds the float32 temporaries (gradient, denominator, master, and one to compute in) to 64 MiB, however large the shard.
MAX_ELEMENTS = 1 << 22


@torch.no_grad()
def adam_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor | None],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    hold: bool = False,
    scale: float | torch.Tensor = 1.0,
    clip: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Update parameters and moments in place, with t = ``step`` (from 1) and gradient g = ``grads`` * ``clip`` / ``scale``::

        g <- g + weight_decay * p                                  (unless decoupled)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        p <- p - lr * weight_decay * p                             (if decoupled)
        p <- p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    All lists have one entry per parameter and live on one device; the tensors of an entry have one shape. What p is depends on
    ``masters[i]``. None: p is ``params[i]``. A tensor of the dtype of the moments: it is p, and ``params[i]`` becomes p rounded to
    nearest. An int16 tensor: p is the float32 of which ``params[i]`` (bfloat16) and it are the parts: see [Note: compact
    master] in :mod:`bmt_core.ops.remainder`. Moments, p and the arithmetic are of one dtype (float32 for parameters of half
    types); gradients may be of another, and stay as they are.

    On the CPU, with ``scale`` 1 and without ``clip``, the result is that of ``torch.optim.Adam`` (or ``AdamW``) in every bit. On
    CUDA it is that of ``torch.optim.Adam(fused=True)``, which rounds in other places of the formula (m, the decoupled decay, the
    quotient): equal to rounding.

    ``hold``: moments move, parameters do not. ``scale`` (a number or one float32 element), ``clip`` (one float32 element) and
    ``skip`` (one element) are read on the device. Where ``skip`` is not 0 nothing changes, whatever the gradients hold.
    """
    settings = Settings(step, lr, beta1, beta2, eps, weight_decay, decoupled, hold, scale, clip, skip)
    for rows in groups(params, grads, exp_avgs, exp_avg_sqs, masters):
        # Fused kernels always write the parameters.
        if rows[0].param.is_cuda and rows[0].is_flat and not hold:
            update_fused(rows, settings)
        else:
            for batch in batches(rows, MAX_ELEMENTS):
                _update(batch, settings)
    if not hold:
        # Whether a parameter was written is seen by its version: fused kernels do not count it, and it must be seen on ranks
        # that hold no element of it too.
        torch.autograd.graph.increment_version(params)


def _update(rows: Sequence[Row], s: Settings) -> None:
    means, squares = [row.exp_avg for row in rows], [row.exp_avg_sq for row in rows]
    weights = [_weight(row) for row in rows]
    grads = _gradients(rows, s)
    if s.weight_decay != 0 and not s.decoupled:
        grads = list(torch._foreach_add(grads, weights, alpha=s.weight_decay))
    skip = None if s.skip is None else s.skip.reshape(()).to(torch.bool)
    if skip is None:
        torch._foreach_lerp_(means, grads, 1 - s.beta1)
        torch._foreach_mul_(squares, s.beta2)
    else:
        # Skipping is made of neutral factors, because a copy to restore from would double the memory: with g = 0,
        # m + 0 * (g - m), 1 * v + g * g and p + m / inf change nothing.
        grads = [grad.masked_fill(skip, 0) for grad in grads]
        torch._foreach_lerp_(means, grads, [_unless(skip, 1 - s.beta1, 0.0, means[0])] * len(means))
        torch._foreach_mul_(squares, _unless(skip, s.beta2, 1.0, squares[0]))
    torch._foreach_addcmul_(squares, grads, grads, 1 - s.beta2)
    del grads
    if s.hold:
        return
    if s.weight_decay != 0 and s.decoupled:
        kept = 1 - s.lr * s.weight_decay
        torch._foreach_mul_(weights, kept if skip is None else _unless(skip, kept, 1.0, weights[0]))
    denominators = torch._foreach_sqrt(squares)
    # One scalar per tensor, although all are equal: for one scalar CUDA multiplies by its reciprocal, and torch.optim does not.
    torch._foreach_div_(denominators, [(1 - s.beta2**s.step) ** 0.5] * len(denominators))
    if skip is None:
        torch._foreach_add_(denominators, s.eps)
    else:
        # alpha selects the overload for tensors; without it torch reads the value on the host.
        torch._foreach_add_(denominators, _unless(skip, s.eps, math.inf, squares[0]), alpha=1.0)
    torch._foreach_addcdiv_(weights, means, denominators, [-(s.lr / (1 - s.beta1**s.step))] * len(weights))
    _write_back(rows, weights)


def _weight(row: Row) -> torch.Tensor:
    if row.master is None:
        return row.param
    return remainder.read_master(row.param, row.master) if row.master.dtype == remainder.DTYPE else row.master


def _write_back(rows: Sequence[Row], weights: list[torch.Tensor]) -> None:
    if rows[0].master is None:
        return
    if rows[0].master.dtype != remainder.DTYPE:
        torch._foreach_copy_([row.param for row in rows], weights)
        return
    for row, weight in zip(rows, weights, strict=True):
        assert row.master is not None
        remainder.write_master(weight, row.param, row.master)


def _gradients(rows: Sequence[Row], s: Settings) -> list[torch.Tensor]:
    """The gradients in the dtype of the moments, unscaled and clipped; the given tensors where nothing is to be done."""
    grads = [row.grad for row in rows]
    if any(row.grad.dtype != row.exp_avg.dtype for row in rows):
        given, grads = grads, [torch.empty_like(row.exp_avg) for row in rows]
        torch._foreach_copy_(grads, given)
    if s.clip is not None:
        grads = list(torch._foreach_mul(grads, s.clip.reshape(())))
    if isinstance(s.scale, torch.Tensor):
        grads = list(torch._foreach_div(grads, s.scale.reshape(())))
    elif s.scale != 1:
        grads = list(torch._foreach_div(grads, s.scale))
    return grads


def _unless(skip: torch.Tensor, value: float, neutral: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).masked_fill(skip, neutral)
