"""Operations on lists of gradients: check for infinities and NaN, sum of powers for a norm,
scale, clear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def has_non_finite(tensors: Sequence[torch.Tensor], flag: torch.Tensor) -> None:
    """Set ``flag`` (one element, uint8) to 1 if any of ``tensors`` holds an infinity or a NaN;
    never clear it.

    The tensors may be of any floating dtype, shape and device, and empty.
    """
    if flag.is_floating_point() or flag.is_complex():
        raise TypeError(
            "flag must be of dtype torch.uint8, or another dtype that the operator | takes,"
            f" not {flag.dtype}."
        )
    if flag.numel() != 1:
        raise ValueError(f"flag must have one element, not {flag.numel()}.")
    for group in _alike(tensors):
        # The largest magnitude does not overflow as a sum of squares would, and is NaN if any
        # element is.
        largest = torch.stack(torch._foreach_norm(group, math.inf))
        bad = ~torch.isfinite(largest).all()
        flag |= bad.to(device=flag.device, dtype=flag.dtype, non_blocking=True)


def powers_sum(
    tensors: Sequence[torch.Tensor], p: float, weights: Sequence[float], device: torch.device
) -> torch.Tensor:
    """Return the sum over tensors of weight times the sum of ``|x|**p``; for p = inf, the
    largest ``|x|``.

    The result is a 0-dim float32 tensor on ``device``, formed in float32 whatever the dtype of the
    tensors, 0 without any. ``p`` is positive.
    """
    by_weight: dict[float, list[torch.Tensor]] = {}
    for tensor, weight in zip(tensors, weights, strict=True):
        by_weight.setdefault(weight, []).append(tensor)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for weight, members in by_weight.items():
        for group in _alike(members):
            norms = torch.stack(
                torch._foreach_norm(
                    group, p, dtype=torch.promote_types(group[0].dtype, torch.float32)
                )
            )
            if p == math.inf:
                total = torch.maximum(total, norms.max().to(total))
            else:
                total = total + norms.pow(p).sum().to(total) * weight
    return total


def scale_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by ``factor`` (one element, float32); half types are
    multiplied in float32, then rounded.
    """
    for group in _alike(tensors):
        # One dimension, because torch would first round a 0-dim factor to the dtype of the tensors.
        factors = [factor.detach().reshape(1).to(group[0].device, non_blocking=True)] * len(group)
        torch._foreach_mul_([t.reshape(1) if t.dim() == 0 else t for t in group], factors)


def zero_if_(tensors: Sequence[torch.Tensor], flag: torch.Tensor) -> None:
    """Set every tensor to zero, in place, where ``flag`` (one element) is not 0; infinities and
    NaN too.
    """
    for tensor in tensors:
        if tensor.numel():
            tensor.masked_fill_(
                flag.reshape(()).to(tensor.device, torch.bool, non_blocking=True), 0
            )


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    # By dtype and device, because torch's foreach functions are fast only then; without empty
    # tensors, which have no maximum.
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
