"""Blocks whose forward is compiled: what they compute, and how often they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compile_models import WIDTH, CompiledGpt, Layer, Training, from_new, gpt, graphs, result

from bmt_testing import gpu_ranks, on_ranks, run_ranks
from bmt_zero import Block
from cells import cells

STEPS = 2
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def plain(layers: int) -> dict[str, Any]:
    return result(Training(gpt(layers), sgd), STEPS)


def compiled(
    layers: int, recomputes: bool, backend: str, limit: int
) -> list[tuple[dict[str, Any], int]]:
    """For each level, what came of it and how many graphs there are by then."""
    found = []
    with from_new(backend, limit) as kind:
        for level in range(4):
            model = CompiledGpt(gpt(layers, kind=kind), level, recomputes)
            found.append((result(Training(model, sgd), STEPS), graphs()))
    return found


def compare(
    world_size: int, *settings: Any, device: str = "cpu", backend: str = "inductor", limit: int = 8
) -> list[Any]:
    """Compare trainings of all levels with plain torch; return the numbers of graphs."""
    layers, recomputes = settings
    init = {"device": device}
    (expected,) = run_ranks(plain, 1, layers, init=init)
    ranks = run_ranks(
        compiled, world_size, layers, recomputes, backend, limit, init=init, timeout=300
    )
    for trainings in zip(*ranks, strict=True):
        for name, value in expected.items():
            of_ranks = [training[name] for training, _ in trainings]
            found = [sum(of_ranks)] if name.startswith("loss") else of_ranks
            for one in found:
                torch.testing.assert_close(
                    one, value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
                )
    return [[count for _, count in trainings] for trainings in ranks]


# Code is generated for the larger graph alone: the other is a part of it.
@pytest.mark.parametrize(
    ("recomputes", "backend"),
    [
        (False, "aot_eager"),
        pytest.param(True, "inductor", marks=pytest.mark.slow("bmt-zero")),
    ],
)
def test_compiled_blocks_train_like_plain_torch_and_all_levels_share_a_graph(
    recomputes: bool, backend: str
) -> None:
    assert compare(2, 2, recomputes, backend=backend) == [[1] * 4] * 2


@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_that_the_compiler_gives_up_train_like_plain_torch(recomputes: bool) -> None:
    assert compare(2, 2, recomputes, backend="aot_eager", limit=0) == [[0] * 4] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("recomputes", [False, True])
def test_on_gpus_compiled_blocks_train_like_plain_torch(recomputes: bool) -> None:
    size = min(gpu_ranks(), 2)
    assert compare(size, 4, recomputes, device="cuda") == [[1] * 4] * size


@on_ranks(2, timeout=120)
@cells("recomputes", [False, True])
def test_many_blocks_of_any_level_are_compiled_once(recomputes: bool) -> None:
    """Once more for calls without gradients, and once for lengths that vary."""
    found = []
    with from_new("eager") as kind:
        for level in range(4):
            training = Training(CompiledGpt(gpt(4, kind=kind), level, recomputes), sgd)
            calls: list[Callable[[], Any]] = [partial(training.step, number) for number in range(3)]
            calls += [partial(training.look, evaluates=evaluates) for evaluates in (False, True)]
            calls += [partial(training.step, 0, length) for length in (8, 10, 12)]
            found.append([])
            for call in calls:
                call()
                found[-1].append(graphs())
    assert found == [[1, 1, 1, 2, 2, 2, 3, 3], *[[3] * 8] * 3]


@on_ranks(1, timeout=120)
@cells("recomputes", [False, True])
def test_each_of_many_classes_is_compiled(recomputes: bool) -> None:
    # As of a layer with adapters, whose class bmt extends once more.
    methods = dict.fromkeys(("merge", "unmerge", "get_base_layer"), lambda layer: layer)
    with from_new("eager", limit=2):
        for number in range(4):
            kind = type(f"Layer{number}", (Layer,), methods if number else {})
            Block(kind(WIDTH), recomputes, compile=True)(torch.ones(2, 8, WIDTH)).sum().backward()
        assert graphs() == 4
