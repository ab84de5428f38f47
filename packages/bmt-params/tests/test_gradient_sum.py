"""The float32 sum that half gradients are the rounding of; how gradients accumulate under the
sharding engine: ``packages/bmt-zero/tests/test_gradient_accumulation.py``.
"""

from __future__ import annotations

import pytest
import torch

from bmt_params.gradient_sum import float32_sum_of, keep_float32_sum


@pytest.mark.parametrize(("start", "shape"), [(0, (3,)), (5, (2, 3)), (11, (1,)), (12, (0,))])
@pytest.mark.parametrize("begin", [0, 4])
def test_the_sum_of_a_gradient_is_at_its_place(
    begin: int, start: int, shape: tuple[int, ...]
) -> None:
    flat = torch.zeros(20, dtype=torch.bfloat16)[begin : begin + 12]
    total = torch.arange(12.0)
    keep_float32_sum(flat, total)
    numel = torch.Size(shape).numel()
    found = float32_sum_of(flat[start : start + numel].view(shape))
    assert found is not None
    assert torch.equal(found, total[start : start + numel].view(shape))


def test_a_gradient_that_was_written_has_no_sum() -> None:
    flat = torch.zeros(12, dtype=torch.bfloat16)
    keep_float32_sum(flat, torch.ones(12))
    flat[3] = 1
    assert float32_sum_of(flat[:3]) is None
    assert float32_sum_of(torch.zeros(3, dtype=torch.bfloat16)) is None


def test_a_gradient_that_is_not_contiguous_has_no_sum() -> None:
    flat = torch.zeros(12, dtype=torch.bfloat16)
    keep_float32_sum(flat, torch.ones(12))
    assert float32_sum_of(flat.view(3, 4).t()) is None
