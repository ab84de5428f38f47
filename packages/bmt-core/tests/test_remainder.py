"""The compact master: a float32 number as its bfloat16 rounding and 16 bits."""

from __future__ import annotations

import math

import pytest
import torch

from bmt_core.ops import read_master, split_master, write_master


def of_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_definition_in_single_numbers() -> None:
    cases = {
        0x00000000: (0x0000, 0),
        0x3F800001: (0x3F80, 1),
        0x3F807FFF: (0x3F80, 0x7FFF),
        0x3F808000: (0x3F81, -0x8000),  # a half goes away from zero
        0xBF808000: (0xBF81, -0x8000),
        0x3F80FFFF: (0x3F81, -1),
        0x7F800000: (0x7F80, 0),  # infinity
        0x7F7FFFFF: (0x7F80, -1),  # the largest float32 is shown as infinity, and kept
        0x00000001: (0x0000, 1),  # denormal
        0x80007FFF: (0x8000, 0x7FFF),
    }
    for bits, (upper, low) in cases.items():
        param, remainder = split_master(of_bits(bits))
        assert (int(bits_of(param)) & 0xFFFF, int(remainder)) == (upper, low), hex(bits)


@pytest.mark.parametrize("written", [0.0, -0.0, 1.0, -3.0, 1e-40, math.inf, -math.inf])
def test_a_written_parameter_moves_its_master_along(written: float) -> None:
    _, remainder = split_master(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    param = torch.full((10000,), written, dtype=torch.bfloat16)
    master = read_master(param, remainder)
    if math.isinf(written):
        largest = math.copysign(torch.finfo(torch.float32).max, written)
        assert (
            (master == written) | (master.abs() > 0.99 * abs(largest))
        ).all() and not master.isnan().any()
    else:
        assert master.isfinite().all()
        shown, _ = split_master(master)
        assert torch.equal(shown, param)


def test_every_shape_and_layout_is_taken() -> None:
    for master in (
        torch.randn(()),
        torch.randn(0),
        torch.randn(3, 4, 5),
        torch.randn(6, 4).t(),
        torch.randn(8)[::2],
    ):
        param, remainder = split_master(master)
        assert torch.equal(read_master(param, remainder), master)


def test_parts_may_be_slices_of_larger_tensors_and_writes_are_counted() -> None:
    params, remainders = torch.zeros(20, dtype=torch.bfloat16), torch.zeros(20, dtype=torch.int16)
    master = torch.randn(7)
    version = params._version
    write_master(master, params[3:10], remainders[3:10])
    assert torch.equal(read_master(params, remainders)[3:10], master) and params._version > version
    assert not params[:3].any() and not params[10:].any() and not remainders[10:].any()


def test_all_upper_halves_with_the_remainders_that_matter() -> None:
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).repeat_interleave(5) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32).repeat(1 << 16)
    master = (upper + low).view(torch.float32)
    param, remainder = split_master(master)
    is_number = ~master.isnan()
    assert torch.equal(
        bits_of(read_master(param, remainder))[is_number], bits_of(master)[is_number]
    )
    # Halves beside an odd number are rounded as elsewhere too: away from zero is the
    # even neighbour.
    is_even_half = (bits_of(master) & 0x1FFFF) == 0x08000
    differs = is_number & (bits_of(param) != bits_of(master.bfloat16()))
    assert torch.equal(differs, is_number & is_even_half)
    assert (
        read_master(param, remainder)[~is_number].isnan().all() and param[~is_number].isnan().all()
    )


@pytest.mark.gpu
def test_on_a_gpu_every_bit_is_that_of_the_cpu() -> None:
    master = (
        torch.randint(-(1 << 31), 1 << 31, (1_000_003,), dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    written = torch.randint(-(1 << 15), 1 << 15, (1_000_003,)).to(torch.int16).view(torch.bfloat16)
    for start in (0, 1):
        values = master[start:]
        param, remainder = split_master(values)
        there_param, there_remainder = split_master(values.cuda())
        assert torch.equal(bits_of(there_param).cpu(), bits_of(param))
        assert torch.equal(there_remainder.cpu(), remainder)
        # Also parameters that somebody else wrote.
        for p in (param, written[start:]):
            back, there = read_master(p, remainder), read_master(p.cuda(), there_remainder).cpu()
            assert torch.equal(back.isnan(), there.isnan())
            assert torch.equal(bits_of(back)[~back.isnan()], bits_of(there)[~back.isnan()])
