"""Adam: sorts parameters into kernel launches, and leaves those without a kernel to
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from bmt_core.ops import reference
from bmt_kernels.checks import (
    as_flag,
    check_device,
    check_same_length,
    check_shape,
    have_one_layout,
    number_at,
)
from bmt_kernels.elements import ELEMENTS, Decay, Form
from bmt_kernels.launcher import Launcher

_FORMS = {
    (torch.float32, None): Form.PLAIN,
    (torch.float16, torch.float32): Form.MASTER_FLOAT16,
    (torch.bfloat16, torch.float32): Form.MASTER_BFLOAT16,
    (torch.bfloat16, torch.int16): Form.REMAINDER,
}
_GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)


class _Row(NamedTuple):
    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None


class _Kind(NamedTuple):
    """How the kernels name the dtypes of a row."""

    form: Form
    grad: int


_Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype | None]
"""Those of a row, in its order."""


def adam_step(
    self: Launcher,
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
    """See :func:`bmt_core.ops.reference.adam_step`; makes one launch per form of weight and dtype
    of gradient.

    Raises :class:`ValueError` or :class:`TypeError`, before anything is written, if shapes, devices
    or dtypes do not fit the parameter, or if tensors share memory.
    """
    check_same_length(
        params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, masters=masters
    )
    launches: dict[tuple[torch.device, _Kind], list[_Row]] = {}
    others: list[_Row] = []
    for i, row in enumerate(map(_Row, params, grads, exp_avgs, exp_avg_sqs, masters)):
        kind = _launch_kind(self, i, row)
        if kind is None:
            others.append(row)
        else:
            launches.setdefault((row.param.device, kind), []).append(row)
    decay, kind_of_decay = weight_decay, Decay.COUPLED
    if decoupled:
        decay, kind_of_decay = 1 - lr * weight_decay, Decay.DECOUPLED
    for (device, kind), rows in launches.items():
        flag = None if skip is None else as_flag("skip", skip, device)
        settings = self.binary.AdamSettings(
            mean_weight=1 - beta1,
            beta2=beta2,
            square_weight=1 - beta2,
            root_correction=(1 - beta2**step) ** 0.5,
            eps=eps,
            step_size=-(lr / (1 - beta1**step)),
            decay=decay,
            decay_kind=Decay.NONE if weight_decay == 0 else kind_of_decay,
            hold=hold,
            scale=1.0 if isinstance(scale, torch.Tensor) else scale,
            scale_at=number_at("scale", scale, device) if isinstance(scale, torch.Tensor) else 0,
            clip_at=number_at("clip", clip, device),
            skip_at=0 if flag is None else flag.data_ptr(),
            skip_is_float=flag is not None and flag.dtype == torch.float32,
        )
        _launch(self, device, kind, rows, settings, hold)
    if others:
        reference.adam_step(
            *zip(*others, strict=True),
            step=step,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            hold=hold,
            scale=scale,
            clip=clip,
            skip=skip,
        )


def _launch(
    self: Launcher,
    device: torch.device,
    kind: _Kind,
    rows: Sequence[_Row],
    settings: Any,
    hold: bool,
) -> None:
    self.binary.adam_step(
        kind.form,
        kind.grad,
        [row.param.data_ptr() for row in rows],
        [row.grad.data_ptr() for row in rows],
        [row.exp_avg.data_ptr() for row in rows],
        [row.exp_avg_sq.data_ptr() for row in rows],
        [0 if row.master is None else row.master.data_ptr() for row in rows],
        [row.param.numel() for row in rows],
        settings,
        self.where(device),
    )
    written = [tensor for row in rows for tensor in (row.exp_avg, row.exp_avg_sq)]
    if not hold:
        written += [
            tensor for row in rows for tensor in (row.param, row.master) if tensor is not None
        ]
    torch.autograd.graph.increment_version(written)


def _launch_kind(self: Launcher, i: int, row: _Row) -> _Kind | None:
    """Return the kind of launch that row ``i`` belongs to, or None if the reference must do it.
    Raise if the row is wrong.
    """
    param, grad, exp_avg, exp_avg_sq, master = row
    device, shape = param.device, param.shape
    if device.type != self.device_type:
        raise ValueError(
            f"params[{i}] is on {device}, and these kernels are for {self.device_type}."
        )
    # This runs for every parameter in every step, so it asks each tensor once.
    others = [grad, exp_avg, exp_avg_sq]
    if master is not None:
        others.append(master)
    is_ordinary = param.is_contiguous() and not param.is_neg()
    for tensor in others:
        if tensor.device != device or tensor.shape != shape:
            _raise_unlike(i, row)
        is_ordinary = is_ordinary and tensor.is_contiguous() and not tensor.is_neg()
    master_dtype = None if master is None else master.dtype
    kind = _kind_of((param.dtype, grad.dtype, exp_avg.dtype, exp_avg_sq.dtype, master_dtype), i)
    if kind is None or not (is_ordinary or have_one_layout((param, *others))):
        return None
    return None if kind.form == Form.PLAIN and not self.equals_torch() else kind


def _raise_unlike(i: int, row: _Row) -> None:
    for name, tensor in row._asdict().items():
        if tensor is not None:
            check_device(f"{name}s[{i}]", tensor, row.param.device)
            check_shape(f"{name}s[{i}]", tensor, row.param.shape)


@cache
def _kind_of(dtypes: _Dtypes, i: int) -> _Kind | None:
    """Return the kind of row ``i`` with these ``dtypes``, None if no kernel takes them; raise if no
    step can be made with them.
    """
    param, grad, exp_avg, exp_avg_sq, master = dtypes
    form = _FORMS.get((param, master))
    weight = torch.float32 if form == Form.REMAINDER else param if master is None else master
    if not exp_avg == exp_avg_sq == weight or not (weight.is_floating_point or weight.is_complex):
        raise TypeError(
            f"Row {i} has a parameter of {param}, a master of {master}, and moments of {exp_avg}"
            f" and {exp_avg_sq}. Moments and weight must be of one floating-point or complex dtype."
        )
    return _Kind(form, ELEMENTS[grad]) if form is not None and grad in _GRADIENTS else None
