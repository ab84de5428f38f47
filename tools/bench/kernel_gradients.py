"""The check, the norm, the casts and the scaling of gradients beside torch's
multi-tensor functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.kernel_timing import Case, copy_case
from bmt_core.ops import REFERENCE, Kernels
from bmt_kernels import cast
from bmt_kernels.provider import CompiledKernels

_TENSORS = 8
Operation = Callable[[Kernels, Sequence[torch.Tensor]], None]


def gradient_cases(
    provider: CompiledKernels, device: torch.device, elements: int, options: argparse.Namespace
) -> Iterator[list[Case]]:
    """Yield the cases of each operation, on float32 and on bfloat16 tensors, beside a copy of as
    many elements of that dtype.
    """
    kernels = Kernels(provider)
    wide = [torch.randn(elements // _TENSORS, device=device) for _ in range(_TENSORS)]
    narrow = [tensor.bfloat16() for tensor in wide]
    both = (("float32", wide), ("bf16", narrow))
    copies = {dtype: copy_case(device, elements, tensors[0].dtype) for dtype, tensors in both}
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    ones = [1.0] * _TENSORS
    factor = torch.ones(1, device=device)

    def check(using: Kernels, tensors: Sequence[torch.Tensor]) -> None:
        using.has_non_finite(tensors, flag)

    def norm(using: Kernels, tensors: Sequence[torch.Tensor]) -> None:
        using.powers_sum(tensors, 2.0, ones, device)

    def scale(using: Kernels, tensors: Sequence[torch.Tensor]) -> None:
        using.scale_(tensors, factor)

    for name, operation, passes in (
        ("non-finite", check, 1),
        ("norm", norm, 1),
        ("scale", scale, 2),
    ):
        for dtype, tensors in both:
            moved = passes * sum(tensor.nbytes for tensor in tensors)
            yield [
                copies[dtype],
                Case(f"{name}, {dtype}, bmt", _bound(operation, kernels, tensors), moved),
                Case(f"{name}, {dtype}, reference", _bound(operation, REFERENCE, tensors), moved),
            ]
    moved = sum(a.nbytes + b.nbytes for a, b in zip(wide, narrow, strict=True))
    yield [
        copies["float32"],
        Case(
            "float32 to bf16, torch",
            lambda: torch._foreach_copy_(narrow, wide),
            moved,
            is_peer=True,
        ),
        Case("float32 to bf16, bmt", lambda: cast(wide, narrow), moved),
        Case("bf16 to float32, torch", lambda: torch._foreach_copy_(wide, narrow), moved),
        Case("bf16 to float32, bmt", lambda: cast(narrow, wide), moved),
    ]


def _bound(
    operation: Operation, using: Kernels, tensors: Sequence[torch.Tensor]
) -> Callable[[], None]:
    return lambda: operation(using, tensors)
