"""Cross entropy in place and through ``FusedCrossEntropy``, and what it refuses. What it
computes is tested by test_kernel_rules.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.ops import reference
from bmt_kernels import cross_entropy_backward_, row_max, softmax_, sum_exp
from bmt_kernels.cross_entropy import write_gradient
from bmt_kernels.provider import CompiledKernels
from pairwise import pairwise

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 2), (5, 17), (4, 33), (2, 1000), (3, 2049), (2, 40003)]


def data(
    rows: int, classes: int, dtype: torch.dtype, device: torch.device, *, offset: int = 0
) -> tuple[torch.Tensor, ...]:
    """Logits (their rows at odd addresses if ``offset`` is odd), targets of which some are
    elsewhere, and class weights.
    """
    generator = torch.Generator().manual_seed(rows * 100_000 + classes)
    logits = (torch.randn(rows, classes, generator=generator) * 4).to(dtype).to(device)
    if offset:
        room = torch.zeros(rows, classes + 2 * offset, dtype=dtype, device=device)
        room[:, offset:-offset] = logits
        logits = room[:, offset:-offset]
    target = torch.randint(-2, classes + 3, (rows,), generator=generator).to(device)
    target[0] = classes - 1
    weight = torch.rand(classes, generator=generator).to(device)
    return logits, target, weight


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    # Float32 arithmetic on numbers up to about 20, and one rounding to ``dtype``, which may be
    # denormal there.
    rounding, smallest = (
        torch.finfo(dtype).eps / 2,
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
    )
    torch.testing.assert_close(
        found.double(), expected, rtol=max(4e-6, rounding), atol=max(2e-6, smallest)
    )


def test_the_gradient_in_the_place_of_the_logits_is_the_definition(
    kernels: CompiledKernels, device: torch.device
) -> None:
    kinds = [(False, False), (True, False), (True, True)]
    for (rows, classes), (with_spread, is_weighted), dtype, offset in pairwise(
        SHAPES, kinds, DTYPES, [0, 1]
    ):
        logits, target, weight = data(rows, classes, dtype, device, offset=offset)
        largest, log_sum, _, _ = kernels.cross_entropy_forward(logits, target)
        generator = torch.Generator().manual_seed(0)
        total, hit, spread = (torch.randn(rows, generator=generator).to(device) for _ in range(3))
        spread /= classes
        expected = logits.double().softmax(1) * total.double().unsqueeze(1)
        if with_spread:
            factors = (
                weight.double() if is_weighted else torch.ones_like(weight, dtype=torch.float64)
            )
            expected -= spread.double().unsqueeze(1) * factors
        for i, column in enumerate(target.tolist()):
            if 0 <= column < classes:
                expected[i, column] -= hit[i].double()
        factors_of_rows = [largest, log_sum, total, hit, spread if with_spread else None]
        given = weight if is_weighted else None
        assert write_gradient(kernels, logits, target, factors_of_rows, logits, weight=given)
        close(logits, expected, dtype)


def test_neighbours_of_strided_rows_are_not_touched(
    kernels: CompiledKernels, device: torch.device
) -> None:
    for dtype, classes in itertools.product(DTYPES, (1, 7, 100, 2050)):
        room = torch.full((5, classes + 7), 2.0, dtype=dtype, device=device)
        softmax_(room[:, 3:-4], torch.full((5,), 2.0, device=device), torch.zeros(5, device=device))
        assert room[:, 3:-4].eq(1).all() and room[:, :3].eq(2).all() and room[:, -4:].eq(2).all()


def test_bad_input_is_refused(kernels: CompiledKernels, device: torch.device) -> None:
    logits, target = (
        torch.zeros(5, 7, device=device),
        torch.zeros(5, dtype=torch.int64, device=device),
    )
    row, weight = torch.zeros(5, device=device), torch.zeros(7, device=device)
    forward, backward = kernels.cross_entropy_forward, kernels.cross_entropy_backward
    with pytest.raises(ValueError, match=r"weight must have shape \(7,\), not \(6,\)"):
        forward(logits, target, weight=weight[:6])
    with pytest.raises(ValueError, match=r"target is on meta"):
        forward(logits, target.to("meta"))
    with pytest.raises(ValueError, match=r"logits are on meta, and these kernels are for"):
        forward(logits.to("meta"), target)
    with pytest.raises(TypeError, match=r"hit must be of dtype torch.float32, not torch.float64"):
        backward(logits, target, row, row, row, row.double(), None)


def test_rows_that_overlap_are_not_written_in_place(
    kernels: CompiledKernels, device: torch.device
) -> None:
    rows = torch.zeros(20, device=device).as_strided((5, 7), (2, 1))
    one, target = torch.ones(5, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    assert not write_gradient(kernels, rows, target, [one, one, one, one, None], rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_float32_copy_of_the_logits(
    kernels: CompiledKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits, target, _ = data(64, 1000, dtype, device)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype.itemsize >= 4:
                largest = max(largest, result.numel())
            return result

    with Watch():
        first, log_sum, _, _ = kernels.cross_entropy_forward(logits, target)
        kernels.cross_entropy_backward(logits, target, first, log_sum, first, first, None)
    assert largest == 4 * 64


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("ranks", [1, 3])
def test_pieces_of_a_split_vocabulary_make_the_softmax(
    device: torch.device, dtype: torch.dtype, ranks: int
) -> None:
    logits = (
        (torch.randn(6, 60, generator=torch.Generator().manual_seed(0)) * 5).to(dtype).to(device)
    )
    logits[2, :20] = -math.inf
    expected = logits.double().softmax(1)
    slices = [part.clone() for part in logits.chunk(ranks, dim=1)]
    largest = torch.stack([row_max(part) for part in slices]).amax(0)
    mass = torch.stack([sum_exp(part, largest) for part in slices]).sum(0)
    results = [softmax_(part, largest, mass.log()) for part in slices]
    assert all(a is b for a, b in zip(results, slices, strict=True))
    close(torch.cat(slices, dim=1), expected, dtype)


def test_pieces_refuse_what_does_not_fit(device: torch.device) -> None:
    logits, row = torch.zeros(4, 3, device=device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"row_max must have shape \(4,\), not \(3,\)"):
        sum_exp(logits, row[:3])
    with pytest.raises(TypeError, match=r"log_sum must be of dtype torch\.float32"):
        softmax_(logits, row, row.half())
    assert sum_exp(torch.full_like(logits, -math.inf), row.fill_(-math.inf)).eq(0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gradient_takes_the_place_of_the_logits(device: torch.device, dtype: torch.dtype) -> None:
    for is_transposed in (False, True):
        logits, target, weight = data(5, 70, dtype, device)
        logits = logits.t().contiguous().t() if is_transposed else logits
        largest, log_sum, _, _ = reference.cross_entropy_forward(logits, target)
        factors = (largest, log_sum, largest.cos(), largest.sin(), largest.cos() / 70)
        expected = reference.cross_entropy_backward(
            logits.double(), target, *map(torch.Tensor.double, factors), weight=weight
        )
        assert cross_entropy_backward_(logits, target, *factors, weight=weight) is logits
        close(logits, expected, dtype)


def test_gradient_shares_memory_with_nothing_but_the_logits(device: torch.device) -> None:
    logits, target = (
        torch.zeros(1, 70, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    one, before = torch.ones(1, device=device), logits.clone()
    with pytest.raises(ValueError, match="share memory, and one of them is written"):
        cross_entropy_backward_(logits, target, logits[0, 3:4], one, one, one, None)
    with pytest.raises(ValueError, match=r"gradient\[0\] and weight\[0\] share memory"):
        cross_entropy_backward_(logits, target, one, one, one, one, one, weight=logits[0])
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_more_logits_than_32_bits_count() -> None:
    from bmt_kernels import CudaKernels

    device, kernels = torch.device("cuda", 0), CudaKernels()
    rows, classes = 2**15 + 3, 2**16 + 1
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device=device)
    logits[-1, -1] = 10.0
    target = torch.full((rows,), classes - 1, device=device)
    largest, log_sum, at_target, _ = kernels.cross_entropy_forward(logits, target)
    assert largest[-1].item() == 10 and largest[0].item() == 0
    expected = torch.tensor([-math.log(classes), -math.log(1 + (classes - 1) * math.exp(-10))])
    torch.testing.assert_close(at_target[[0, -1]].cpu(), expected, rtol=1e-5, atol=1e-6)
    ones = torch.ones(rows, device=device)
    assert write_gradient(kernels, logits, target, [largest, log_sum, ones, ones, None], logits)
    assert logits[-1, -1].item() == pytest.approx(math.expm1(expected[1].item()), rel=1e-2)
