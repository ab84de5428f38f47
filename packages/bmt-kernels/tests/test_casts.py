"""Casts against torch's, for every pair of dtypes, every half, odd sizes and places."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bmt_kernels import cast
from bmt_kernels.provider import CompiledKernels
from pairwise import pairwise

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
SIZES = [0, 1, 7, 15, 16, 17, 33, 1000, 8193, 70001]


def cast_with(
    kernels: CompiledKernels, sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> None:
    """``cast``, which takes the CPU's instructions from the module that ``kernels`` has set up."""
    assert kernels.available() is None
    cast(sources, targets)


def every_half(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, device=device).short().view(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in every bit, but any NaN is as good as another."""
    assert found.dtype == expected.dtype
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    is_nan = expected.isnan()
    return torch.equal(found.isnan(), is_nan) and torch.equal(
        found[~is_nan].view(bits), expected[~is_nan].view(bits)
    )


@pytest.mark.parametrize(
    ("source", "target", "offsets"), pairwise(DTYPES, DTYPES, [(0, 0), (1, 0), (0, 1), (3, 3)])
)
def test_any_size_and_place(
    kernels: CompiledKernels,
    device: torch.device,
    source: torch.dtype,
    target: torch.dtype,
    offsets: tuple[int, int],
) -> None:
    generator = torch.Generator().manual_seed(0)
    sources, targets, rooms = [], [], []
    for size in SIZES:
        room = torch.full((size + offsets[1] + 3,), 7.0, dtype=target, device=device)
        sources.append(
            (torch.randn(size + offsets[0], generator=generator) * 100)
            .to(source)
            .to(device)[offsets[0] :]
        )
        targets.append(room[offsets[1] : offsets[1] + size])
        rooms.append(room)
    versions = [t._version for t in targets]
    cast_with(kernels, sources, targets)
    assert all(same(found, given.to(target)) for found, given in zip(targets, sources, strict=True))
    assert all(room[: offsets[1]].eq(7).all() and room[-3:].eq(7).all() for room in rooms)
    assert all(t._version > version for t, version in zip(targets, versions, strict=True))


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even_also_for_denormals(
    kernels: CompiledKernels, device: torch.device, target: torch.dtype
) -> None:
    """Around every number of the target: the number, the tie to the next one, and both neighbours
    of the tie.
    """
    numbers = every_half(target, device)
    numbers = numbers[numbers.isfinite()]
    bits = numbers.float().view(torch.int32)
    step = 1 << (16 if target == torch.bfloat16 else 13)
    near = [bits + d for d in (0, 1, -1, step // 2 - 1, step // 2, step // 2 + 1)]
    # Ties between the denormals of float16 are not where its normal numbers have them.
    tiny = (torch.arange(-2049, 2050, device=device).float() * 2.0**-25).view(torch.int32)
    special = torch.tensor(
        [math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, 65519.996, 65520.0], device=device
    )
    wide = torch.cat([*near, tiny, tiny + 1, tiny - 1, special.view(torch.int32)]).view(
        torch.float32
    )
    found = torch.empty(len(wide), dtype=target, device=device)
    cast_with(kernels, [wide], [found])
    assert same(found, wide.to(target))


@pytest.mark.parametrize(("source", "target"), PAIRS[3:])
def test_every_half_keeps_its_value(
    kernels: CompiledKernels, device: torch.device, source: torch.dtype, target: torch.dtype
) -> None:
    given = every_half(source, device)
    found = torch.empty(len(given), dtype=target, device=device)
    cast_with(kernels, [given], [found])
    assert same(found, given.to(target))


def test_all_kinds_in_one_call(kernels: CompiledKernels, device: torch.device) -> None:
    """Those without a kernel (float64, other layouts) are torch's, in the same call."""
    sources = [torch.randn(i % 50, device=device).to(PAIRS[i % 9][0]) for i in range(1200)]
    targets = [torch.empty(i % 50, dtype=PAIRS[i % 9][1], device=device) for i in range(1200)]
    x = torch.randn(6, 8, device=device)
    sources += [x, x.double(), x.t(), x[:, :5], x]
    targets += [
        torch.empty(6, 8, dtype=torch.float64, device=device),
        torch.empty(6, 8, dtype=torch.float16, device=device),
        torch.empty(8, 6, dtype=torch.bfloat16, device=device),
        torch.empty(6, 5, dtype=torch.bfloat16, device=device),
        torch.empty(8, 6, dtype=torch.bfloat16, device=device).t(),
    ]
    cast_with(kernels, sources, targets)
    assert all(
        same(t.flatten().float(), s.flatten().to(t.dtype).float())
        for s, t in zip(sources, targets, strict=True)
    )
    cast([], [])


def test_elements_that_are_read_with_the_other_sign(
    kernels: CompiledKernels, device: torch.device
) -> None:
    source = torch._neg_view(torch.arange(5.0, device=device))
    target = torch.empty(5, dtype=torch.bfloat16, device=device)
    cast_with(kernels, [source], [target])
    assert target.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]


def test_bad_input_is_refused(kernels: CompiledKernels, device: torch.device) -> None:
    x, y = torch.zeros(10, device=device), torch.ones(10, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="lengths are sources 1, targets 2"):
        cast_with(kernels, [x], [y, y])
    with pytest.raises(ValueError, match=r"targets\[0\] must have shape \(10,\), not \(9,\)"):
        cast_with(kernels, [x], [y[:9]])
    with pytest.raises(ValueError, match=r"targets\[0\] is on meta, and must be on"):
        cast_with(kernels, [x], [y.to("meta")])
    with pytest.raises(ValueError, match=r"targets\[0\] and targets\[1\] share memory"):
        cast_with(kernels, [x[:5], x[:5]], [y[:5], y[4:9]])
    with pytest.raises(ValueError, match=r"sources\[0\] and targets\[0\] share memory"):
        cast_with(kernels, [x[:5]], [x.view(torch.bfloat16)[3:8]])
    assert y.eq(1).all() and x.eq(0).all()
