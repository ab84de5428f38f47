"""Adam's state of a parameter: the number of its steps, two moments, and for half types a
float32 master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bmt_core.ops import split_master
from bmt_optim.managed_optimizer import complaint_about_shapes

State = dict[str, Any]
MASTER = "_param_fp32"
"""The key of a whole master."""
REMAINDER = "_param_remainder"
"""The key of the 16 bits of a master that its bfloat16 parameter lacks: see [Note: compact master]
in bmt_core.ops.remainder.
"""


def complaint_about(shapes: Mapping[str, torch.Size | None], shape: torch.Size) -> str | None:
    """Return why tensors of ``shapes`` are not Adam's state of a parameter of ``shape``; None if
    they are.
    """
    missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in shapes]
    if missing:
        return (
            f"has no {' and no '.join(missing)} but {', '.join(shapes)}: it is another optimizer's"
        )
    if "max_exp_avg_sq" in shapes:
        return "has max_exp_avg_sq: it is of Adam with amsgrad, which AdamOptimizer does not know"
    return complaint_about_shapes(("exp_avg", "exp_avg_sq", MASTER, REMAINDER), shapes, shape)


def new_state(p: torch.nn.Parameter, *, is_compact: bool) -> State:
    """Return the state before the first step; ``is_compact``: with a remainder instead of a
    whole master.
    """
    # Half moments would overflow (fp16) or stall (bf16), so state is never narrower than float32.
    dtype = torch.promote_types(p.dtype, torch.float32)
    state = {"step": 0, "exp_avg": zeros(p, dtype), "exp_avg_sq": zeros(p, dtype)}
    return {**state, **new_master(p, is_compact=is_compact)}


def new_master(p: torch.nn.Parameter, *, is_compact: bool) -> State:
    """Return the state's entry for a master equal to ``p``; an empty state if the parameter is its
    own master.
    """
    if is_compact:
        return {REMAINDER: zeros(p, torch.int16)}
    dtype = torch.promote_types(p.dtype, torch.float32)
    return {} if p.dtype == dtype else {MASTER: p.detach().to(dtype)}


def zeros(p: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros with the shape and strides of ``p``."""
    return torch.zeros_like(
        p, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
    )


def master_or_remainder(state: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the whole master or the remainder, whichever the state has; None for a parameter that
    is its own master.
    """
    found: torch.Tensor | None = state.get(REMAINDER, state.get(MASTER))
    return found


@torch.no_grad()
def followed_master(master: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return ``master`` where ``p`` is its rounding, and the value of ``p`` where it is not,
    because ``p`` was written there.

    Both roundings of halves are accepted: see [Note: compact master] in
    :mod:`bmt_core.ops.remainder`. If ``p`` was converted from a half type to a wider one, it still
    has the half type's rounding.
    """
    value = p.detach().to(master.device)
    is_half = value.dtype in (torch.float16, torch.bfloat16)
    dtypes = [value.dtype] if is_half else [value.dtype, torch.float16, torch.bfloat16]
    roundings = [master.to(dtype) for dtype in dtypes]
    if torch.bfloat16 in dtypes:
        roundings.append(split_master(master)[0])
    is_rounding = torch.stack([value == rounding.to(value.dtype) for rounding in roundings]).any(0)
    return torch.where(is_rounding, master, value.to(master.dtype))


def copied_state(
    state: Mapping[str, Any], p: torch.nn.Parameter, device: torch.device, into: Mapping[str, Any]
) -> State:
    """Return a copy of a state of ``p`` with all tensors on ``device``, those of floating point in
    float32 or wider.

    Tensors of ``into`` with the right shape, dtype and device are reused; the others are new.
    """
    wide = torch.promote_types(p.dtype, torch.float32)
    copied: State = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            dtype, there = wide if value.is_floating_point() else value.dtype, into.get(key)
            expected = (value.shape, dtype, device)
            if (
                isinstance(there, torch.Tensor)
                and (there.shape, there.dtype, there.device) == expected
            ):
                value = there.copy_(value.detach())
            else:
                value = value.detach().to(device=device, dtype=dtype, copy=True)
        copied[key] = value
    return copied
