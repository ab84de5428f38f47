"""Check, norm, scale and clear against plain torch in double precision, for every dtype and
odd size.
"""

from __future__ import annotations

import math

import pytest
import torch

from bmt_core.ops import reference
from bmt_kernels import CpuKernels
from bmt_kernels.provider import CompiledKernels

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 7, 15, 16, 17, 33, 127, 1000, 4097, 8193, 70001]
POWERS = [1.0, 2.0, 3.0, 0.5, math.inf]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_every_non_finite_element_is_found(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype, bad: float
) -> None:
    info = torch.finfo(dtype)
    for size in (1, 17, 33, 4097):
        clean = torch.full((size + 1,), info.max, dtype=dtype, device=device)[1:]
        clean[::2] = -info.smallest_normal / 4
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        kernels.has_non_finite([clean], flag)
        assert flag.item() == 0
        for place in {0, size // 2, size - 1}:
            spoiled = clean.clone()
            spoiled[place] = bad
            flag.zero_()
            kernels.has_non_finite([clean, spoiled, clean], flag)
            assert flag.item() == 1
            kernels.has_non_finite([clean], flag)
            assert flag.item() == 1, "it is never cleared"


def test_non_finite_check_takes_everything(kernels: CompiledKernels, device: torch.device) -> None:
    tensors = everything(device)
    for dtype in (torch.uint8, torch.bool, torch.int32):
        flag = torch.zeros((), dtype=dtype, device=device)
        kernels.has_non_finite(tensors * 5, flag)
        assert flag.item() == 0
        for tensor in (tensors[-1], tensors[10], tensors[-2]):
            before = tensor.clone()
            tensor.view(-1)[-1:].fill_(math.nan) if tensor.is_contiguous() else tensor[
                -1, -1
            ].fill_(math.nan)
            flag.zero_()
            kernels.has_non_finite(tensors, flag)
            assert flag.item() == 1
            tensor.copy_(before)
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    kernels.has_non_finite([], flag)
    kernels.has_non_finite([torch.empty(0, device=device)], flag)
    assert flag.item() == 0


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_sum_of_powers(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype, p: float, offset: int
) -> None:
    tensors = tensors_of(dtype, device, offset=offset)
    weights = [1.0 / (1 + i % 3) for i in range(len(tensors))]
    total = kernels.powers_sum(tensors, p, weights, device)
    magnitudes = [t.double().abs() for t in tensors]
    if p == math.inf:
        expected = max(m.max().item() for m in magnitudes if m.numel())
    else:
        expected = sum(w * m.pow(p).sum().item() for w, m in zip(weights, magnitudes, strict=True))
    assert total.dtype == torch.float32 and total.shape == () and total.device == device
    # Sums of at most 256 numbers in float32, and one rounding at the end.
    assert total.item() == pytest.approx(expected, rel=1e-6)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_powers_of_what_is_not_finite(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype
) -> None:
    for place in (0, 20, 36):
        x = torch.ones(37, dtype=dtype, device=device)
        x[place] = math.inf
        for p in POWERS:
            assert kernels.powers_sum([x, x], p, [1.0, 1.0], device).item() == math.inf
        x[place] = math.nan
        for p in POWERS:
            assert math.isnan(
                kernels.powers_sum([torch.ones_like(x), x], p, [1.0, 1.0], device).item()
            ), p


def test_sum_of_powers_of_little_and_of_nothing(
    kernels: CompiledKernels, device: torch.device
) -> None:
    for p in POWERS:
        assert kernels.powers_sum([], p, [], device).item() == 0
        assert kernels.powers_sum([torch.empty(0, device=device)], p, [1.0], device).item() == 0
    small = torch.full((1000,), 1e-42, device=device)
    assert kernels.powers_sum([small], 1.0, [1.0], device).item() == pytest.approx(1e-39, rel=1e-2)
    assert kernels.powers_sum([small], math.inf, [1.0], device).item() == small[0].item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_scaling_is_in_float32_then_rounded(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype, offset: int
) -> None:
    tensors = tensors_of(dtype, device, offset=offset)
    factor = torch.tensor(1 / 3, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    expected = [(t.to(wide) * factor).to(dtype) for t in tensors]
    kernels.scale_(tensors, factor)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_rounds_to_nearest_also_denormals(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype
) -> None:
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15, device=device).short().view(dtype)
    else:
        x = torch.randn(65536, device=device).to(dtype) * torch.finfo(dtype).smallest_normal
    x = x[~x.isnan()]
    for factor in (1 / 3, 1.0, 2.0**-9, 1000.0, -0.0):
        found, number = x.clone(), torch.tensor(factor, device=device)
        kernels.scale_([found], number)
        expected = (x.to(torch.promote_types(dtype, torch.float32)) * number).to(dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_scaling_and_clearing_take_everything(
    kernels: CompiledKernels, device: torch.device
) -> None:
    tensors, twins = everything(device), everything(device)
    for tensor, twin in zip(tensors, twins, strict=True):
        twin.copy_(tensor)
    versions = [t._version for t in tensors]
    factor = torch.tensor(0.3, device=device)
    kernels.scale_(tensors, factor)
    reference.scale_(twins, factor)
    assert all(torch.equal(a, b) for a, b in zip(tensors, twins, strict=True))
    assert all(t._version > v for t, v in zip(tensors, versions, strict=True) if t.numel())
    for dtype in (torch.uint8, torch.bool, torch.float32, torch.int64):
        kernels.zero_if_(tensors, torch.zeros(1, dtype=dtype, device=device))
        assert all(torch.equal(a, b) for a, b in zip(tensors, twins, strict=True))
    kernels.zero_if_(tensors[:20], torch.ones(1, dtype=torch.float32, device=device))
    assert all(t.eq(0).all() for t in tensors[:20]) and torch.equal(tensors[20], twins[20])
    for tensor in tensors:
        tensor.fill_(math.nan)
    kernels.zero_if_(tensors, torch.full((), 2, dtype=torch.uint8, device=device))
    assert all(t.eq(0).all() for t in tensors)


def test_neighbours_are_not_touched(kernels: CompiledKernels, device: torch.device) -> None:
    for dtype in DTYPES:
        for start, end in ((1, 2), (3, 20), (5, 90), (7, 101)):
            x = torch.ones(103, dtype=dtype, device=device)
            kernels.scale_([x[start:end]], torch.tensor(2.0, device=device))
            kernels.zero_if_([x[start:end]], torch.ones(1, dtype=torch.uint8, device=device))
            assert x.sum().item() == 103 - (end - start)


def test_complex_tensors_are_left_to_the_reference(
    kernels: CompiledKernels, device: torch.device
) -> None:
    def tensors() -> list[torch.Tensor]:
        return [torch.tensor([1 + 2j, 3 - 4j], device=device), torch.ones(3, device=device)]

    found, expected = tensors(), tensors()
    flags = [torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(2)]
    kernels.has_non_finite(found, flags[0])
    kernels.has_non_finite([*found, torch.tensor([complex(0, math.nan)], device=device)], flags[1])
    assert [flag.item() for flag in flags] == [0, 1]
    for p in (1.0, 2.0, math.inf):
        norm = kernels.powers_sum(found, p, [1.0, 1.0], device)
        assert torch.equal(norm, reference.powers_sum(expected, p, [1.0, 1.0], device))
    half = torch.full((1,), 0.5, device=device)
    kernels.scale_(found, half)
    reference.scale_(expected, half)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    kernels.zero_if_(found, flags[1])
    assert not any(tensor.any() for tensor in found)


def test_bad_input_is_refused(kernels: CompiledKernels, device: torch.device) -> None:
    x, one = torch.ones(10, device=device), torch.ones(1, device=device)
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"scale_: tensors\[0\] and tensors\[1\] share memory"):
        kernels.scale_([x, x[5:]], one)
    with pytest.raises(ValueError, match=r"zero_if_: tensors\[0\] and flag\[0\] share memory"):
        kernels.zero_if_([x], x[3])
    with pytest.raises(ValueError, match="factor must have one element, not 2"):
        kernels.scale_([x], torch.ones(2, device=device))
    with pytest.raises(ValueError, match="flag must have one element, not 0"):
        kernels.has_non_finite([x], flag[:0])
    with pytest.raises(
        TypeError,
        match=r"tensors\[1\] must be of a floating-point or complex dtype, not torch.int64",
    ):
        kernels.has_non_finite([x, x.long()], flag)
    with pytest.raises(TypeError, match=r"flag must be of dtype torch.uint8.*, not torch.float32"):
        kernels.has_non_finite([torch.ones(3, device=device)], torch.zeros(1, device=device))
    with pytest.raises(TypeError, match="floating-point"):
        kernels.scale_([x.long()], one)
    with pytest.raises(ValueError, match="lengths are tensors 1, weights 2"):
        kernels.powers_sum([x], 2.0, [1.0, 1.0], device)
    with pytest.raises(ValueError, match=r"p must be positive, it is -1\.0"):
        kernels.powers_sum([x], -1.0, [1.0], device)
    assert x.eq(1).all()


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


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    from bmt_kernels import CudaKernels

    device, kernels = torch.device("cuda", 0), CudaKernels()
    tensors = [t for t in everything(device) if t.is_contiguous()]
    flag, factor = torch.zeros(1, dtype=torch.uint8, device=device), torch.ones(1, device=device)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            kernels.has_non_finite(tensors, flag)
            kernels.powers_sum(tensors, 2.0, [1.0] * len(tensors), device)
            kernels.scale_(tensors, factor)
            kernels.zero_if_(tensors, flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
