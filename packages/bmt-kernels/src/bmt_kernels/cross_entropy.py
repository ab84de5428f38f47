"""Cross entropy over rows of logits: one pass in forward, one in backward, and no float32 copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.ops import reference
from bmt_kernels.checks import check_device, check_dtype, check_shape
from bmt_kernels.elements import ELEMENTS
from bmt_kernels.launcher import Launcher

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cross_entropy_forward(
    self: Launcher,
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    first_class: int = 0,
    weight: torch.Tensor | None = None,
    with_sum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`bmt_core.ops.reference.cross_entropy_forward`; takes one pass over the logits."""
    _check(self, logits, target, weight)
    if not _is_served(logits):
        return reference.cross_entropy_forward(
            logits, target, first_class=first_class, weight=weight, with_sum=with_sum
        )
    results = torch.empty((4, len(logits)), dtype=torch.float32, device=logits.device)
    row_max, log_sum, target_log_prob, log_prob_sum = results
    target, weight = target.contiguous(), _float_weight(weight)
    self.binary.cross_entropy_forward(
        logits.data_ptr(),
        ELEMENTS[logits.dtype],
        [*logits.shape, logits.stride(0)],
        target.data_ptr(),
        first_class,
        0 if weight is None else weight.data_ptr(),
        [
            row_max.data_ptr(),
            log_sum.data_ptr(),
            target_log_prob.data_ptr(),
            log_prob_sum.data_ptr() if with_sum else 0,
        ],
        self.where(logits.device),
    )
    return row_max, log_sum, target_log_prob, log_prob_sum if with_sum else None


def cross_entropy_backward(
    self: Launcher,
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
    """See :func:`bmt_core.ops.reference.cross_entropy_backward`; computes p as exp(x -
    row_max - log_sum).
    """
    if out is not None:
        check_shape("out", out, logits.shape)
        check_dtype("out", out, logits.dtype)
        check_device("out", out, logits.device)
    gradient = torch.empty_like(logits) if out is None else out
    factors = [row_max, log_sum, total, hit, spread]
    if write_gradient(
        self, logits, target, factors, gradient, first_class=first_class, weight=weight
    ):
        return gradient
    return reference.cross_entropy_backward(
        logits,
        target,
        row_max,
        log_sum,
        total,
        hit,
        spread,
        first_class=first_class,
        weight=weight,
        out=gradient,
    )


def write_gradient(
    self: Launcher,
    logits: torch.Tensor,
    target: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
    *,
    first_class: int = 0,
    weight: torch.Tensor | None = None,
) -> bool:
    """Write the gradient to ``gradient``, which may be ``logits``; return False if there is no
    kernel for these logits.

    ``factors``: row_max, log_sum, total, hit and spread.
    """
    _check(self, logits, target, weight)
    if not _is_served(logits) or not _is_served(gradient) or not _rows_are_apart(gradient):
        return False
    kept = [
        _row_factor(name, factor, logits) for name, factor in zip(_FACTORS, factors, strict=True)
    ]
    target, weight = target.contiguous(), _float_weight(weight)
    self.binary.cross_entropy_backward(
        logits.data_ptr(),
        ELEMENTS[logits.dtype],
        [*logits.shape, logits.stride(0)],
        target.data_ptr(),
        first_class,
        0 if weight is None else weight.data_ptr(),
        [0 if factor is None else factor.data_ptr() for factor in kept],
        gradient.data_ptr(),
        gradient.stride(0),
        self.where(logits.device),
    )
    torch.autograd.graph.increment_version(gradient)
    return True


_FACTORS = ("row_max", "log_sum", "total", "hit", "spread")


def _row_factor(
    name: str, factor: torch.Tensor | None, logits: torch.Tensor
) -> torch.Tensor | None:
    if factor is None:
        if name != "spread":
            raise TypeError(f"{name} must be a tensor, not None.")
        return None
    check_shape(name, factor, logits.shape[:1])
    check_dtype(name, factor, torch.float32)
    check_device(name, factor, logits.device)
    return factor.contiguous()


def _check(
    self: Launcher, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
) -> None:
    if logits.device.type != self.device_type:
        raise ValueError(
            f"logits are on {logits.device}, and these kernels are for {self.device_type}."
        )
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (N, C), not {tuple(logits.shape)}.")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be of a floating-point dtype, not {logits.dtype}.")
    check_shape("target", target, logits.shape[:1])
    check_dtype("target", target, torch.int64)
    check_device("target", target, logits.device)
    if weight is not None:
        check_shape("weight", weight, logits.shape[1:])
        check_device("weight", weight, logits.device)


def _is_served(logits: torch.Tensor) -> bool:
    rows, classes = logits.shape
    has_contiguous_rows = classes == 1 or logits.stride(1) == 1
    return logits.dtype in _DTYPES and rows > 0 and classes > 0 and has_contiguous_rows


def _rows_are_apart(gradient: torch.Tensor) -> bool:
    rows, classes = gradient.shape
    return rows <= 1 or gradient.stride(0) >= classes


def _float_weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.detach().to(torch.float32).contiguous()
