"""BMTrain's low-level names beside the losses."""

from __future__ import annotations

import torch

from bmt_params.losses.cross_entropy_rows import kernels_for


def has_inf_nan(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Set ``out`` (uint8, one element) to 1 if ``tensor`` (any floating dtype and shape) holds inf
    or NaN; never clear it.

    >>> out = torch.zeros(1, dtype=torch.uint8)
    >>> has_inf_nan(torch.tensor([1.0, float("nan")]), out)
    >>> out
    tensor([1], dtype=torch.uint8)
    """
    if out.dtype != torch.uint8 or out.numel() != 1:
        raise ValueError(
            f"out must be a uint8 tensor with one element, not {out.dtype} with {out.numel()}."
        )
    if not tensor.is_floating_point():
        raise TypeError(f"has_inf_nan checks floating-point tensors, not {tensor.dtype}.")
    kernels_for(tensor.device).has_non_finite([tensor.detach()], out)
