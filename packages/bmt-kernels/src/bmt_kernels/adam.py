"""Adam: sorts parameters into kernel launches, and leaves those without a kernel to
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class _LaunchKey(NamedTuple):
    """The properties that all rows of one launch share; rows with equal keys share a launch."""

    device: torch.device
    form: Form
    grad: int


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
    launches: dict[_LaunchKey, list[_Row]] = {}
    others: list[_Row] = []
    for i, row in enumerate(map(_Row, params, grads, exp_avgs, exp_avg_sqs, masters)):
        key = _launch_key(self, i, row)
        (others if key is None else launches.setdefault(key, [])).append(row)
    decay, kind_of_decay = weight_decay, Decay.COUPLED
    if decoupled:
        decay, kind_of_decay = 1 - lr * weight_decay, Decay.DECOUPLED
    for key, rows in launches.items():
        flag = None if skip is None else as_flag("skip", skip, key.device)
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
            scale_at=number_at("scale", scale, key.device)
            if isinstance(scale, torch.Tensor)
            else 0,
            clip_at=number_at("clip", clip, key.device),
            skip_at=0 if flag is None else flag.data_ptr(),
            skip_is_float=flag is not None and flag.dtype == torch.float32,
        )
        _launch(self, key, rows, settings, hold)
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
    self: Launcher, key: _LaunchKey, rows: Sequence[_Row], settings: Any, hold: bool
) -> None:
    self.binary.adam_step(
        key.form,
        key.grad,
        [row.param.data_ptr() for row in rows],
        [row.grad.data_ptr() for row in rows],
        [row.exp_avg.data_ptr() for row in rows],
        [row.exp_avg_sq.data_ptr() for row in rows],
        [0 if row.master is None else row.master.data_ptr() for row in rows],
        [row.param.numel() for row in rows],
        settings,
        self.where(key.device),
    )
    written = [tensor for row in rows for tensor in (row.exp_avg, row.exp_avg_sq)]
    if not hold:
        written += [
            tensor for row in rows for tensor in (row.param, row.master) if tensor is not None
        ]
    torch.autograd.graph.increment_version(written)


def _launch_key(self: Launcher, i: int, row: _Row) -> _LaunchKey | None:
    """Return the key of the launch that row ``i`` belongs to, or None if the reference must do it.
    Raise if the row is wrong.
    """
    param, grad, exp_avg, exp_avg_sq, master = row
    device, shape = param.device, param.shape
    if device.type != self.device_type:
        raise ValueError(
            f"params[{i}] is on {device}, and these kernels are for {self.device_type}."
        )
    for name, tensor in row._asdict().items():
        if tensor is not None and tensor is not param:
            if tensor.device != device:
                check_device(f"{name}s[{i}]", tensor, device)
            if tensor.shape != shape:
                check_shape(f"{name}s[{i}]", tensor, shape)
    form = _FORMS.get((param.dtype, None if master is None else master.dtype))
    weight = (
        torch.float32 if form == Form.REMAINDER else param.dtype if master is None else master.dtype
    )
    if not exp_avg.dtype == exp_avg_sq.dtype == weight or not (
        weight.is_floating_point or weight.is_complex
    ):
        raise TypeError(
            f"Row {i} has a parameter of {param.dtype}, a master of"
            f" {None if master is None else master.dtype}, and moments of {exp_avg.dtype} and"
            f" {exp_avg_sq.dtype}. Moments and weight must be of one floating-point or"
            " complex dtype."
        )
    if form is None or grad.dtype not in _GRADIENTS:
        return None
    tensors = row[:-1] if master is None else row
    if not have_one_layout(tensors):  # type: ignore[arg-type]
        return None
    if form == Form.PLAIN and not self.equals_torch():
        return None
    return _LaunchKey(device, form, ELEMENTS[grad.dtype])
