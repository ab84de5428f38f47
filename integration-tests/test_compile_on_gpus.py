"""A GPT of compiled Blocks on GPUs, with what trains beside them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compile_models import CompiledGpt, Training, from_new, gpt, graphs, result

from bmt_optim import AdamOptimizer
from bmt_testing import gpu_ranks, run_ranks

STEPS, LENGTH = 6, 512
shape = partial(gpt, 10, dtype=torch.bfloat16, width=64)


def plain() -> list[float]:
    training = Training(shape(), partial(AdamOptimizer, lr=3e-3))
    return [float(training.step(number, LENGTH)) for number in range(STEPS)]


def compiled(recomputes: bool) -> tuple[list[float], int]:
    with from_new() as kind:
        model = CompiledGpt(shape(kind=kind), 3, recomputes)
        training = Training(model, partial(AdamOptimizer, lr=3e-3, overlap_forward=True))
        losses = [float(training.step(number, LENGTH)) for number in range(STEPS)]
        count = graphs()
        for value in result(training, 1).values():
            assert value is not None and value.isfinite().all()
        return losses, count


@pytest.mark.gpu
@pytest.mark.parametrize("recomputes", [True, False])
def test_compiled_blocks_of_half_precision_train_between_wrapped_parameters(
    recomputes: bool,
) -> None:
    size = min(gpu_ranks(), 2)
    (expected,) = run_ranks(plain, 1, init={"device": "cuda"}, timeout=120)
    ranks = run_ranks(
        compiled, size, recomputes, init={"device": "cuda", "reduce_dtype": "param"}, timeout=300
    )
    found = [sum(losses) for losses in zip(*[losses for losses, _ in ranks], strict=True)]
    assert found == pytest.approx(expected, rel=0.02) and found[-1] < found[0]
    assert [count for _, count in ranks] == [1] * size
