"""Check, norm, scale and clear: how many elements, which threads, and what is refused. What they
compute is tested by test_kernel_rules.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from bmt_kernels import CpuKernels
from bmt_kernels.provider import CompiledKernels

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 7, 15, 16, 17, 33, 127, 1000, 4097, 8193, 70001]


def tensors_of(dtype: torch.dtype, device: torch.device, *, offset: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(size + offset, generator=generator).to(dtype).to(device)[offset:]
        for size in SIZES
    ]


def everything(device: torch.device) -> list[torch.Tensor]:
    """All dtypes, sizes and some layouts in one list."""
    found = [
        t
        for dtype in DTYPES
        for offset in (0, 1, 3)
        for t in tensors_of(dtype, device, offset=offset)
    ]
    return [*found, torch.randn(9, 4, device=device).t(), torch.randn(9, 8, device=device)[:, 1:6]]


def test_sum_of_powers_of_everything_is_the_same_each_time(
    kernels: CompiledKernels, device: torch.device
) -> None:
    tensors = everything(device)[:-1] * 15  # more than one launch takes
    results = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.add(kernels.powers_sum(tensors, 2.0, [1.0] * len(tensors), device).item())
    assert len(results) == 1
    expected = sum(t.double().square().sum().item() for t in tensors)
    assert results.pop() == pytest.approx(expected, rel=1e-6)


def test_bad_input_is_refused(kernels: CompiledKernels, device: torch.device) -> None:
    x, one = torch.ones(10, device=device), torch.ones(1, device=device)
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"scale_: tensors\[0\] and tensors\[1\] share memory"):
        kernels.scale_([x, x[5:]], one)
    with pytest.raises(ValueError, match=r"zero_if_: tensors\[0\] and flag\[0\] share memory"):
        kernels.zero_if_([x], x[3])
    with pytest.raises(
        TypeError,
        match=r"tensors\[1\] must be of a floating-point or complex dtype, not torch.int64",
    ):
        kernels.has_non_finite([x, x.long()], flag)
    with pytest.raises(ValueError, match=r"p must be positive, it is -1\.0"):
        kernels.powers_sum([x], -1.0, [1.0], device)
    assert x.eq(1).all()


@pytest.mark.slow("bmt-kernels")
def test_more_elements_than_32_bits_count_on_the_cpu() -> None:
    size = 2**31 + 4099
    x = torch.zeros(size, dtype=torch.bfloat16)  # pages that are only read share one page of memory
    flag = torch.zeros(1, dtype=torch.uint8)
    CpuKernels().has_non_finite([x], flag)
    assert flag.item() == 0
    x[size - 3] = math.inf
    CpuKernels().has_non_finite([x], flag)
    assert flag.item() == 1
    x[size - 3] = 3.0
    assert CpuKernels().powers_sum([x], 2.0, [1.0], torch.device("cpu")).item() == 9.0


@pytest.mark.gpu
def test_more_elements_than_32_bits_count_on_a_gpu() -> None:
    from bmt_kernels import CudaKernels

    size, device = 2**31 + 4099, torch.device("cuda", 0)
    x = torch.ones(size, dtype=torch.bfloat16, device=device)
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    kernels = CudaKernels()
    kernels.has_non_finite([x], flag)
    assert flag.item() == 0
    assert kernels.powers_sum([x], 2.0, [1.0], device).item() == pytest.approx(size, rel=1e-6)
    kernels.scale_([x], torch.tensor(2.0, device=device))
    assert x[-1].item() == x[0].item() == x[2**31].item() == 2
    x[size - 3] = math.nan
    kernels.has_non_finite([x], flag)
    assert flag.item() == 1
    kernels.zero_if_([x], flag)
    assert x[-9:].eq(0).all() and x[:9].eq(0).all()
