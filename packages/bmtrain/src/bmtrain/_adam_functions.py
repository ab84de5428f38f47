"""BMTrain's functions below its optimizers: one Adam update of one parameter with a
float32 master.
"""

from __future__ import annotations

import torch

from bmt_core.ops.reference.adam import adam_step


def adam_fp16(
    param_fp32: torch.Tensor,
    param_fp16: torch.Tensor,
    g_fp16: torch.Tensor,
    m_fp16: torch.Tensor,
    v_fp32: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    scale: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update master, parameter and both moments in place, with decoupled decay: see
    :class:`AdamOptimizer`.

    All tensors have one size and lie on one device. Gradients are divided by ``scale``; ``step``
    counts from 1. The first moment, of a half type, is rounded after the update.
    """
    mean = m_fp16.float()
    adam_step(
        [param_fp16],
        [g_fp16],
        [mean],
        [v_fp32],
        [param_fp32],
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=True,
        scale=scale,
    )
    m_fp16.copy_(mean)


adam_bf16 = adam_fp16


def adam_cpu(
    param_fp32: torch.Tensor,
    param_fp16: torch.Tensor,
    delta_info: None,
    g_fp16: torch.Tensor,
    m_fp32: torch.Tensor,
    v_fp32: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
    scale: float,
    weight_decay: float,
    step: int,
) -> None:
    """Like :func:`adam_fp16`, in host memory and with both moments in float32. ``delta_info`` must
    be None.
    """
    if delta_info is not None:
        raise ValueError(
            "delta_info must be None. AdamOffloadOptimizer(record_delta=True) records;"
            " get_avg_delta() gives it."
        )
    moments = (beta1, beta2, eps, lr, scale, weight_decay, step)
    adam_fp16(param_fp32, param_fp16, g_fp16, m_fp32, v_fp32, *moments)


def fp16_from_fp32(param_fp32: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``param_fp32`` in float16."""
    return param_fp32.to(torch.float16)


def bf16_from_fp32(param_fp32: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``param_fp32`` in bfloat16."""
    return param_fp32.to(torch.bfloat16)
