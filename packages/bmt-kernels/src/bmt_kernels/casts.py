"""Casts of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_kernels.checks import check_device, check_same_length, check_shape, have_one_layout
from bmt_kernels.elements import ELEMENTS
from bmt_kernels.provider import kernels_on

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def cast(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write each of ``sources`` to its entry of ``targets``, rounded to nearest (ties to even) in
    the target's dtype.

    All tensors are on one device. Those that have a kernel (float32, float16, bfloat16, in one
    layout) share one launch; the others are copied by torch. Raises :class:`ValueError`, before
    anything is written, for tensors of different shapes or devices and for targets that share
    memory with anything else.

    >>> half = torch.empty(2, dtype=torch.bfloat16)
    >>> cast([torch.tensor([1.0, 1.00390625])], [half])
    >>> half
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    check_same_length(sources=sources, targets=targets)
    ours: list[tuple[torch.Tensor, torch.Tensor]] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    kernels = kernels_on(sources[0].device) if sources else None
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        check_shape(f"targets[{i}]", target, source.shape)
        check_device(f"targets[{i}]", target, sources[0].device)
        check_device(f"sources[{i}]", source, sources[0].device)
        is_served = (
            source.dtype in _DTYPES
            and target.dtype in _DTYPES
            and have_one_layout((source, target))
        )
        (ours if kernels is not None and is_served else others).append((source, target))
    if kernels is not None and ours:
        kernels.binary.cast(
            [source.data_ptr() for source, _ in ours],
            [ELEMENTS[source.dtype] for source, _ in ours],
            [target.data_ptr() for _, target in ours],
            [ELEMENTS[target.dtype] for _, target in ours],
            [source.numel() for source, _ in ours],
            kernels.where(sources[0].device),
        )
        torch.autograd.graph.increment_version([target for _, target in ours])
    for source, target in others:
        target.copy_(source)
