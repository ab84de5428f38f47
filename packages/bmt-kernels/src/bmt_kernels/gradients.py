"""Operations on all gradients of a step: check, norm, scale, clear. One launch for all dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bmt_core.ops import reference
from bmt_kernels.checks import BYTE_FLAGS, as_flag, check_one_element, check_same_length, is_dense
from bmt_kernels.elements import ELEMENTS, Power
from bmt_kernels.launcher import Launcher

_KINDS = {1.0: Power.SUM, 2.0: Power.SQUARES, math.inf: Power.LARGEST}


class _Memory(NamedTuple):
    """Tensors in the form that the compiled modules take."""

    addresses: list[int]
    numels: list[int]
    elements: list[int]


def has_non_finite(self: Launcher, tensors: Sequence[torch.Tensor], flag: torch.Tensor) -> None:
    """See :func:`bmt_core.ops.reference.has_non_finite`."""
    check_one_element("flag", flag)
    ours, others = _sorted(self, tensors, flag.device if flag.dtype in BYTE_FLAGS else None)
    if ours:
        self.binary.has_non_finite(*_memory(ours), flag.data_ptr(), self.where(flag.device))
        torch.autograd.graph.increment_version(flag)
    if others:
        reference.has_non_finite(others, flag)


def powers_sum(
    self: Launcher,
    tensors: Sequence[torch.Tensor],
    p: float,
    weights: Sequence[float],
    device: torch.device,
) -> torch.Tensor:
    """See :func:`bmt_core.ops.reference.powers_sum`; partial sums are formed in float32, their sum
    in float64.
    """
    check_same_length(tensors=tensors, weights=weights)
    if not p > 0:
        raise ValueError(f"p must be positive, it is {p}.")
    ours, others = _sorted(self, tensors, _with_index(device))
    if others or not ours:
        return reference.powers_sum(tensors, p, weights, device)
    result = torch.empty((), dtype=torch.float32, device=device)
    workspace = torch.empty(self.binary.POWERS_SUM_WORKSPACE, dtype=torch.float64, device=device)
    kind = _KINDS.get(float(p), Power.OTHER)
    self.binary.powers_sum(
        *_memory(ours),
        list(map(float, weights)),
        kind,
        float(p),
        result.data_ptr(),
        workspace.data_ptr(),
        self.where(result.device),
    )
    return result


def scale_(self: Launcher, tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """See :func:`bmt_core.ops.reference.scale_`; tensors that share memory raise
    :class:`ValueError`.
    """
    check_one_element("factor", factor)
    ours, others = _sorted(self, tensors, factor.device if factor.dtype == torch.float32 else None)
    if ours:
        self.binary.scale_(*_memory(ours), factor.data_ptr(), self.where(factor.device))
        torch.autograd.graph.increment_version(ours)
    if others:
        reference.scale_(others, factor)


def zero_if_(self: Launcher, tensors: Sequence[torch.Tensor], flag: torch.Tensor) -> None:
    """See :func:`bmt_core.ops.reference.zero_if_`; tensors that share memory raise
    :class:`ValueError`.
    """
    readable = as_flag("flag", flag, flag.device)
    ours, others = _sorted(self, tensors, flag.device, only_floats=False)
    if ours:
        is_float = readable.dtype == torch.float32
        self.binary.zero_if_(*_memory(ours), readable.data_ptr(), is_float, self.where(flag.device))
        torch.autograd.graph.increment_version(ours)
    if others:
        reference.zero_if_(others, flag)


def _sorted(
    self: Launcher,
    tensors: Sequence[torch.Tensor],
    device: torch.device | None,
    *,
    only_floats: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors for the kernels, which are on ``device`` (None: no tensor is), and those
    for the reference.
    """
    ours: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    is_served = device is not None and device.type == self.device_type
    for i, tensor in enumerate(tensors):
        if only_floats and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"tensors[{i}] must be of a floating-point or complex dtype, not {tensor.dtype}."
            )
        fits = (
            is_served and tensor.dtype in ELEMENTS and tensor.device == device and is_dense(tensor)
        )
        (ours if fits else others).append(tensor)
    return ours, others


def _memory(tensors: Sequence[torch.Tensor]) -> _Memory:
    return _Memory(
        [tensor.data_ptr() for tensor in tensors],
        [tensor.numel() for tensor in tensors],
        [ELEMENTS[tensor.dtype] for tensor in tensors],
    )


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
