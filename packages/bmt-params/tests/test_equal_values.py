"""``check_equal_values`` finds, on all ranks and by one message, the first tensor in which
ranks differ.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from counting import Counting

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, rank
from bmt_params.guards.equal_values import check_equal_values, sum_of_bits
from bmt_params.guards.same_data import _PERIOD, _weights, fingerprint
from bmt_testing import on_ranks, run_ranks

Named = list[tuple[str, torch.Tensor]]

DTYPES = [
    *[
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float16,
    ],
    *[torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
]


def of_all_dtypes() -> Named:
    """Tensors with NaN, with one element, without any, and with gaps between their elements."""
    values = torch.arange(24.0).view(2, 3, 4)
    alike = [(str(dtype), values.to(dtype)) for dtype in DTYPES]
    others = {"nan": torch.tensor(float("nan")), "one": torch.ones((), dtype=torch.float64)}
    others |= {
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    gaps = [("column", values[0, :, 1]), ("one of a column", torch.ones(1, 6).double()[:, 0])]
    return [
        *alike,
        *others.items(),
        ("none", torch.empty(0, 3)),
        *gaps,
        ("turned", torch.ones(3, 5).double().t()),
    ]


def outcome(named: Named) -> tuple[str, list[str]]:
    """The error, and the collectives that were made."""
    with Counting() as calls:
        try:
            check_equal_values(named, current().world, "Do it so.")
            return "", calls
        except ConfigError as error:
            return str(error), calls


@on_ranks(4)
def test_equal_tensors_of_any_dtype_pass_by_one_message() -> None:
    assert outcome(of_all_dtypes()) == ("", ["all_gather"])


def changed(named: Named) -> None:
    named[3][1][1, 0, 0] += 1


def signed(named: Named) -> None:
    named[9][1][0, 0, 0] = -0.0


def exchanged(named: Named) -> None:
    named[10][1][:] = named[10][1].flip(0)


def shortened(named: Named) -> None:
    named[1] = named[1][0], named[1][1][:1]


def as_other_dtype(named: Named) -> None:
    named[2] = named[2][0], named[2][1].to(torch.uint8)


def renamed(named: Named) -> None:
    named[0] = "weight", named[0][1]


def without_the_last(named: Named) -> None:
    del named[-1]


CHANGES: dict[Callable[[Named], None], str] = {
    changed: "torch.int16 has other values on rank 1 than on rank 0. Do it so.",
    signed: "torch.float32 has other values on rank 1 than on rank 0. Do it so.",
    exchanged: "torch.float64 has other values on rank 1 than on rank 0. Do it so.",
    shortened: (
        "torch.uint8 of shape (2, 3, 4) and uint8 where rank 1 has torch.uint8 of shape (1, 3, 4)"
        " and uint8."
    ),
    as_other_dtype: (
        "torch.int8 of shape (2, 3, 4) and int8 where rank 1 has torch.int8 of shape (2, 3, 4)"
        " and uint8."
    ),
    renamed: (
        "Rank 0 has torch.bool of shape (2, 3, 4) and bool where rank 1 has weight of shape (2, 3,"
        " 4) and bool."
    ),
    without_the_last: (
        "Rank 0 has turned of shape (5, 3) and float64 where rank 1 has nothing more."
    ),
}


def different() -> list[str]:
    found = []
    for change in CHANGES:
        named = of_all_dtypes()
        if rank() > 0:
            change(named)
        found.append(outcome(named)[0])
    return [*found, outcome(of_all_dtypes())[0]]


def test_all_ranks_name_the_first_tensor_that_differs() -> None:
    for *found, of_equal in run_ranks(different, 4):
        assert (
            all(text in error for text, error in zip(CHANGES.values(), found, strict=True))
            and not of_equal
        )


def test_a_sum_of_bits_depends_on_every_bit_and_on_the_order_beyond_one_piece() -> None:
    piece = 4 << 15  # bytes
    long = torch.zeros(3 * piece + 3, dtype=torch.uint8)
    sums = {int(sum_of_bits(long))}
    places = (0, 1, 7, piece - 1, piece, 2 * piece, 3 * piece - 1, 3 * piece, 3 * piece + 2)
    for place in places:
        for bit in range(8):
            long[place] = 1 << bit
            sums.add(int(sum_of_bits(long)))
        long[place] = 0
    assert len(sums) == 1 + len(places) * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_of_bits_differs_for_signs_and_values_that_are_exchanged(dtype: torch.dtype) -> None:
    values = torch.randn(100_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {int(sum_of_bits(values))}
    for one, other in ((0, 1), (0, 2), (0, 32768), (32768, 65536), (5, 100_000)):
        turned, exchanged = values.clone(), values.clone()
        turned[[one, other]] *= -1
        exchanged[[one, other]] = values[[other, one]]
        sums |= {int(sum_of_bits(turned)), int(sum_of_bits(exchanged)), int(sum_of_bits(-turned))}
    assert len(sums) == 1 + 5 * 3
    for start in range(5):  # wherever a tensor lies in memory
        assert sum_of_bits(values[start:]) == sum_of_bits(values[start:].clone())


@pytest.mark.parametrize("count", [0, 3, _PERIOD + 1, 17 * _PERIOD + 5])
def test_a_fingerprint_is_a_norm_and_products_with_random_numbers_that_are_repeated(
    count: int,
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    weights = _weights(values.device).repeat(1, 18)[:, :count]
    expected = [values.double().norm(), *(weights * values).sum(1)]
    assert fingerprint(values).tolist() == pytest.approx([float(x) for x in expected], rel=1e-9)


def numbers_under(device: str) -> list[float]:
    """What stands for tensors while the program has set a default device."""
    x = torch.arange(5.0)
    with torch.device(device):
        return [float(sum_of_bits(x)), *fingerprint(x).tolist()]


def test_numbers_that_stand_for_tensors_do_not_depend_on_the_default_device() -> None:
    (found,), (expected,) = (run_ranks(numbers_under, 1, device) for device in ("meta", "cpu"))
    assert found == expected


def test_sums_of_bits_of_random_changes_differ() -> None:
    """Of numbers with few bits, such as zeros, ones and halves, too."""
    generator = torch.Generator().manual_seed(0)
    for values in (torch.tensor([0.0, 1.0, 0.5, -1.0]), torch.randn(64, generator=generator)):
        tensor = values[torch.randint(len(values), (200_000,), generator=generator)]
        sums = {int(sum_of_bits(tensor))}
        for place, other in (
            torch.randperm(len(tensor), generator=generator)[:600].view(-1, 2).tolist()
        ):
            changed = tensor.clone()
            changed[place] += 4
            sums.add(int(sum_of_bits(changed)))
            changed[[place, other]] = changed[[other, place]]
            sums.add(int(sum_of_bits(changed)))
        assert len(sums) == 601
