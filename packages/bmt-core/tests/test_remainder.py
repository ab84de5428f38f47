"""The compact master: a float32 number as its bfloat16 rounding and 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_core.ops import read_master, remainder_for
from bmt_core.ops.remainder import split_master, write_master


def of_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_every_number_is_kept_in_every_bit_and_shown_rounded_to_nearest(bits: list[int]) -> None:
    master = of_bits(*bits)
    param, remainder = split_master(master)
    back = read_master(param, remainder)
    is_number = ~master.isnan()
    assert torch.equal(bits_of(back)[is_number], bits_of(master)[is_number])
    assert back[~is_number].isnan().all() and param[~is_number].isnan().all()
    # Nearest: no bfloat16 is closer than the one shown; even and away from zero differ in exact halves only.
    is_half = (bits_of(master) & 0xFFFF) == 0x8000
    compared = is_number & ~is_half
    assert torch.equal(param[compared], master.bfloat16()[compared])


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


def test_nan_stays_nan_whatever_its_bits() -> None:
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001):
        param, remainder = split_master(of_bits(bits))
        assert param.isnan() and remainder == 0 and read_master(param, remainder).isnan()


@pytest.mark.parametrize("written", [0.0, -0.0, 1.0, -3.0, 1e-40, math.inf, -math.inf])
def test_a_written_parameter_moves_its_master_along(written: float) -> None:
    _, remainder = split_master(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    param = torch.full((10000,), written, dtype=torch.bfloat16)
    master = read_master(param, remainder)
    if math.isinf(written):
        largest = math.copysign(torch.finfo(torch.float32).max, written)
        assert ((master == written) | (master.abs() > 0.99 * abs(largest))).all() and not master.isnan().any()
    else:
        assert master.isfinite().all()
        shown, _ = split_master(master)
        assert torch.equal(shown, param)


def test_every_shape_and_layout_is_taken() -> None:
    for master in (torch.randn(()), torch.randn(0), torch.randn(3, 4, 5), torch.randn(6, 4).t(), torch.randn(8)[::2]):
        param, remainder = split_master(master)
        assert torch.equal(read_master(param, remainder), master)


def test_memory_to_compute_in_may_be_given() -> None:
    master, spare = torch.randn(9), torch.empty(9, dtype=torch.int32)
    param, remainder = torch.empty(9, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int16)
    expected, out = master.clone(), torch.empty(9)
    write_master(master, param, remainder, spare)
    assert read_master(param, remainder, out) is out and torch.equal(out, expected)


def test_remainder_for_a_parameter_that_was_rounded_to_even() -> None:
    master = of_bits(0x3F808000, 0xBF808000, 0x3F818000, 0x3F801234, 0x3F80FEDC)
    even = master.bfloat16()
    back = read_master(even, remainder_for(even, master))
    assert torch.equal(back[2:], master[2:])
    # The even neighbour of a half is closer to zero here: the next float32 on its side is meant.
    assert bits_of(back[:2]).tolist() == bits_of(of_bits(0x3F807FFF, 0xBF807FFF)).tolist()
    ours, expected = split_master(master)
    assert torch.equal(remainder_for(ours, master), expected)
