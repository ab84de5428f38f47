"""Adam (Kingma and Ba 2015, Algorithm 1), with the decay of AdamW (Loshchilov and Hutter 2019,
Algorithm 2) if asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bmt_core.ops.remainder import DTYPE as REMAINDER
from bmt_core.ops.remainder import read_master, write_master
from bmt_core.torch_internals import fused_adam_, fused_adamw_

# Elements updated at once: limits the float32 temporaries to 256 MiB for any shard (a gradient and
# a denominator per element, and two more numbers for a master in two parts). The same limit for
# every kind of master, because how torch's fused kernels round depends on the length of
# their inputs.
MAX_ELEMENTS = 1 << 24


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
    """Update parameters and moments in place, with t = ``step`` (from 1) and gradient g =
    ``grads`` * ``clip`` / ``scale``::

        g <- g + weight_decay * p                                  (unless decoupled)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g**2
        p <- p - lr * weight_decay * p                             (if decoupled)
        p <- p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    All lists have one entry per parameter and live on one device; the tensors of an entry have one
    shape. What p is depends on ``masters[i]``. None: p is ``params[i]``. A tensor of the dtype of
    the moments: it is p, and ``params[i]`` becomes p rounded to nearest. An int16 tensor: p is the
    float32 of which ``params[i]`` (bfloat16) and it are the parts, as defined in
    [Note: compact master] of :mod:`bmt_core.ops.remainder`; moments and p are those of a float32
    master in every bit. Moments, p and the arithmetic are of one dtype (float32 for parameters of
    half types); gradients may be of another. A complex number counts as two real ones.
    On the CPU, with ``scale`` 1 and without ``clip``, the result is that of ``torch.optim.Adam``
    (or ``AdamW``) in every bit; on CUDA torch's own fused kernel does the work, which is that of
    ``torch.optim.Adam(fused=True)``.

    With ``hold`` moments are updated and parameters are not. ``scale`` (a number or one float32
    element), ``clip`` (one float32 element) and ``skip`` (one element) are read on the device.
    Where ``skip`` is not 0 nothing changes, even if gradients are NaN.
    """
    settings = _Settings(
        step, lr, beta1, beta2, eps, weight_decay, decoupled, hold, scale, clip, skip
    )
    for rows in _batches(params, grads, exp_avgs, exp_avg_sqs, masters):
        update = _update_compact if _is_compact(rows[0]) else _update_whole
        update(rows, settings)
    if not hold:
        # Blocks and caches recognise a changed parameter by its version. Fused kernels do not
        # always increment it, and ranks that hold no element of the parameter write nothing.
        torch.autograd.graph.increment_version(params)


@dataclass(frozen=True)
class _Settings:
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    hold: bool
    scale: float | torch.Tensor
    clip: torch.Tensor | None
    skip: torch.Tensor | None


@dataclass(frozen=True)
class _Row:
    """The tensors of one parameter, or of a slice of it."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None


def _is_compact(row: _Row) -> bool:
    return row.master is not None and row.master.dtype == REMAINDER


def _update_compact(rows: Sequence[_Row], s: _Settings) -> None:
    """Read the masters, update them like float32 parameters, and write them back in two parts."""
    masters = [read_master(row.param, row.master) for row in rows if row.master is not None]
    whole = [
        replace(row, param=master, master=None) for row, master in zip(rows, masters, strict=True)
    ]
    _update_whole(whole, s)
    if s.hold:
        return
    for row, updated in zip(rows, whole, strict=True):
        assert row.master is not None
        write_master(updated.param, row.param, row.master)


def _update_whole(rows: Sequence[_Row], s: _Settings) -> None:
    update = _update_fused if rows[0].param.is_cuda and _has_one_layout(rows[0]) else _update
    update(rows, s)


def _has_one_layout(row: _Row) -> bool:
    """Whether all tensors of ``row`` have the same strides, without gaps, as torch's fused
    kernels need.
    """
    if not _is_dense(row.param):
        return False
    others = [
        tensor
        for tensor in (row.grad, row.exp_avg, row.exp_avg_sq, row.master)
        if tensor is not None
    ]
    return all(tensor.stride() == row.param.stride() for tensor in others)


def _is_dense(tensor: torch.Tensor) -> bool:
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.is_contiguous() or tensor.permute(by_stride).is_contiguous()


def _update(rows: Sequence[_Row], s: _Settings) -> None:
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
        # Where the step is skipped, factors make the same operations change nothing, because a copy
        # to restore from would double the memory: g = 0, m + 0 * (g - m), 1 * v + g * g and p +
        # m / inf.
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
    # A list of equal scalars: with one scalar CUDA multiplies by its reciprocal, which torch.optim
    # does not do.
    torch._foreach_div_(denominators, [(1 - s.beta2**s.step) ** 0.5] * len(denominators))
    if skip is None:
        torch._foreach_add_(denominators, s.eps)
    else:
        # alpha selects the overload for tensors; without it torch reads the value on the host.
        torch._foreach_add_(denominators, _unless(skip, s.eps, math.inf, squares[0]), alpha=1.0)
    torch._foreach_addcdiv_(
        weights, means, denominators, [-(s.lr / (1 - s.beta1**s.step))] * len(weights)
    )
    if rows[0].master is not None:
        torch._foreach_copy_([row.param for row in rows], weights)


def _update_fused(rows: Sequence[_Row], s: _Settings) -> None:
    fused = fused_adamw_ if s.decoupled else fused_adam_
    step = torch.full((), float(s.step), device=rows[0].param.device)
    fused(
        [_weight(row) for row in rows],
        _gradients(rows, s),
        [row.exp_avg for row in rows],
        [row.exp_avg_sq for row in rows],
        [],
        [step] * len(rows),
        lr=0.0 if s.hold else s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if s.skip is None else s.skip.reshape(()).ne(0).float(),
    )
    if rows[0].master is not None and not s.hold:
        torch._foreach_copy_([row.param for row in rows], [_weight(row) for row in rows])


def _weight(row: _Row) -> torch.Tensor:
    return row.param if row.master is None else row.master


def _gradients(rows: Sequence[_Row], s: _Settings) -> list[torch.Tensor]:
    """Return the gradients in the dtype of the moments, clipped and divided by the scale; not
    copied if nothing changes.
    """
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


def _batches(*columns: Sequence[torch.Tensor | None]) -> Iterator[list[_Row]]:
    """Yield lists of rows with equal dtypes and layouts and at most MAX_ELEMENTS elements; longer
    flat shards are cut.
    """
    groups: dict[tuple[torch.dtype, torch.dtype | None, bool], list[_Row]] = {}
    for index, column in enumerate(zip(*columns, strict=True)):
        # torch would repeat a tensor of one element.
        shapes = [tuple(tensor.shape) for tensor in column if tensor is not None]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"The tensors of parameter {index} must have one shape; theirs are"
                f" {', '.join(map(str, shapes))}."
            )
        row = _Row(*map(_as_real, column))
        if row.param.numel():
            kind = None if row.master is None else row.master.dtype
            groups.setdefault((row.exp_avg.dtype, kind, _has_one_layout(row)), []).append(row)
    for rows in groups.values():
        batch: list[_Row] = []
        elements = 0
        for row in (piece for whole in rows for piece in _slices(whole)):
            if batch and elements + row.param.numel() > MAX_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(row)
            elements += row.param.numel()
        yield batch


def _as_real(tensor: Any) -> Any:
    """Return complex numbers as pairs of real ones, which Adam treats as two numbers, as
    in torch.
    """
    return torch.view_as_real(tensor) if tensor is not None and tensor.is_complex() else tensor


def _slices(row: _Row) -> Iterator[_Row]:
    if row.param.dim() != 1 or row.param.numel() <= MAX_ELEMENTS:
        yield row
        return
    for start in range(0, row.param.numel(), MAX_ELEMENTS):
        part = slice(start, start + MAX_ELEMENTS)
        master = None if row.master is None else row.master[part]
        yield _Row(row.param[part], row.grad[part], row.exp_avg[part], row.exp_avg_sq[part], master)
