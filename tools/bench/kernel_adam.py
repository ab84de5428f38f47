"""Adam: each form of weight beside torch's fused AdamW on float32, and DeepSpeed's for the CPU if
it can be imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from bench.kernel_timing import Case, copy_case
from bmt_core.ops import REFERENCE, Kernels, split_master
from bmt_kernels.provider import CompiledKernels

_HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
}
# Bytes that a step reads and writes per parameter: gradient, moments and weight.
_PLAIN, _MASTER, _REMAINDER = 4 + 16 + 8, 2 + 16 + 8 + 2, 2 + 16 + 4 + 4


def adam_cases(
    provider: CompiledKernels, device: torch.device, elements: int, options: argparse.Namespace
) -> Iterator[list[Case]]:
    """Yield all cases, as one list."""
    kernels = Kernels(provider)
    bf16 = torch.bfloat16
    cases = [
        copy_case(device, elements),
        Case(
            "torch fused AdamW, float32",
            _torch_adam(elements, device),
            _PLAIN * elements,
            is_peer=True,
        ),
        Case(
            "bmt, float32", _step(kernels, elements, device, torch.float32, None), _PLAIN * elements
        ),
        Case(
            "bmt, bf16, float32 master",
            _step(kernels, elements, device, bf16, torch.float32),
            _MASTER * elements,
        ),
        Case(
            "bmt, fp16, float32 master",
            _step(kernels, elements, device, torch.float16, torch.float32),
            _MASTER * elements,
        ),
        Case(
            "bmt, bf16, 16-bit remainder",
            _step(kernels, elements, device, bf16, torch.int16),
            _REMAINDER * elements,
        ),
        Case(
            "reference, bf16, float32 master",
            _step(REFERENCE, elements, device, bf16, torch.float32),
            _MASTER * elements,
        ),
    ]
    theirs = _deepspeed(elements) if device.type == "cpu" else None
    yield cases if theirs is None else [*cases, theirs]


def _step(
    kernels: Kernels,
    elements: int,
    device: torch.device,
    dtype: torch.dtype,
    master: torch.dtype | None,
) -> Callable[[], object]:
    weight = torch.randn(elements, device=device)
    param = weight.to(dtype)
    grad = torch.randn(elements, device=device).to(dtype)
    mean, square = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    masters: list[torch.Tensor | None] = [None if master is None else weight]
    if master == torch.int16:
        param, remainder = split_master(weight)
        masters = [remainder]
    if device.type == "cpu":
        return lambda: kernels.adam_step(
            [param], [grad], [mean], [square], masters, step=7, **_HYPER
        )
    # As in training: what decides is read on the device.
    clip, scale = torch.ones(1, device=device), torch.ones(1, device=device)
    skip = torch.zeros(1, dtype=torch.uint8, device=device)
    return lambda: kernels.adam_step(
        [param],
        [grad],
        [mean],
        [square],
        masters,
        step=7,
        **_HYPER,
        clip=clip,
        scale=scale,
        skip=skip,
    )


def _torch_adam(elements: int, device: torch.device) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.randn(elements, device=device))
    param.grad = torch.randn(elements, device=device)
    return torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True).step


def _deepspeed(elements: int) -> Case | None:
    name = "DeepSpeedCPUAdam, float32"
    try:
        kind: Any = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        param = torch.nn.Parameter(torch.randn(elements))
        param.grad = torch.randn(elements)
        return Case(name, kind([param], lr=1e-3, weight_decay=0.01).step, _PLAIN * elements)
    except Exception as error:  # it is compiled at this moment, and fails in ways of its own
        print(f"{name} is left out: {type(error).__name__}: {error}")
        return None
