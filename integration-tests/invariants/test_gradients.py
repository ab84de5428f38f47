"""Gradients conserve sums: a rank's part of a gradient is the sum of what all ranks have computed,
at every level, however the micro-batches are accumulated and whatever is frozen.

All numbers are small integers, so that sums are exact in every dtype.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bmt_core import rank
from bmt_params import DistributedParameter
from bmt_testing import run_ranks
from bmt_zero import Block, no_sync


@dataclass(frozen=True)
class Accumulation:
    """What is drawn: parameters with and without gradients, and how micro-batches are summed."""

    shapes: tuple[tuple[int, ...], ...]
    frozen: frozenset[int]
    dtype: torch.dtype
    level: int
    recomputes: bool
    micro_batches: int
    holds_back: bool


SHAPES = st.lists(st.integers(1, 23), max_size=3).map(tuple)


@st.composite
def accumulations(draw: st.DrawFn) -> Accumulation:
    shapes = tuple(draw(st.lists(SHAPES, min_size=1, max_size=4)))
    return Accumulation(
        shapes=shapes,
        frozen=frozenset(draw(st.sets(st.integers(1, 3), max_size=2))),  # the first is trained
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        level=draw(st.integers(0, 3)),
        recomputes=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 3)),
        holds_back=draw(st.booleans()),
    )


class Weighted(nn.Module):
    """Returns the sum of its parameters, each times factors, which are their gradients."""

    def __init__(self, case: Accumulation) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.ones(shape, dtype=case.dtype), requires_grad=number not in case.frozen
            )
            for number, shape in enumerate(case.shapes)
        )

    def forward(self, *factors: torch.Tensor) -> torch.Tensor:
        products = [(self.weights[n] * factor).sum() for n, factor in enumerate(factors)]
        return torch.stack(products).sum()


def factors_of(case: Accumulation, of_rank: int, micro_batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * of_rank + micro_batch)
    return [
        torch.randint(-3, 4, shape, generator=generator).to(case.dtype) for shape in case.shapes
    ]


def gathered_gradients(case: Accumulation) -> list[torch.Tensor | None]:
    model = Weighted(case)
    Block(model, zero_level=case.level, use_checkpoint=case.recomputes)
    for micro_batch in range(case.micro_batches):
        is_last = micro_batch == case.micro_batches - 1
        with nullcontext() if is_last or not case.holds_back else no_sync(model):
            model(*factors_of(case, rank(), micro_batch)).backward()
    return [
        None if parameter.grad is None else _whole(parameter) for parameter in model.parameters()
    ]


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DistributedParameter) and parameter.grad is not None
    return parameter.gather_like(parameter.grad)


@settings(max_examples=30)
@given(accumulations(), st.sampled_from([1, 2, 4]))
def test_the_ranks_parts_of_a_gradient_are_the_sum_over_ranks_and_micro_batches(
    case: Accumulation, ranks: int
) -> None:
    summed = [torch.zeros(shape, dtype=case.dtype) for shape in case.shapes]
    for number in range(ranks):
        for micro_batch in range(case.micro_batches):
            for total, factor in zip(summed, factors_of(case, number, micro_batch), strict=True):
                total += factor
    expected = [None if n in case.frozen else total for n, total in enumerate(summed)]
    for found in run_ranks(gathered_gradients, ranks, case):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
