"""``backward(loss_sum, count=tokens)``: gradients of the mean over the tokens of the whole batch,
as plain torch computes it in one process, however unequal the ranks' and micro-batches' shares are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from token_trainings import OPTIMIZERS, Record, of_plain_torch, of_ranks, without_waiting

from bmt_testing import run_ranks

GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "level 0": (2, {"zero_level": 0}),
    "level 1, mean": (2, {"zero_level": 1, "gradients": "mean"}),
    "level 2": (4, {"zero_level": 2}),
    "level 3, mean": (4, {"zero_level": 3, "gradients": "mean"}),
    "copies": (4, {"shard_size": 2}),
    "copies, states over all": (4, {"shard_size": 2, "optimizer_shards": "all"}),
    "tp": (2, {"tp_size": 2}),
    "tp x dp, mean": (4, {"tp_size": 2, "gradients": "mean"}),
    "pp": (2, {"pipe_size": 2}),
    "pp x dp, mean": (4, {"pipe_size": 2, "gradients": "mean"}),
    "pp x tp": (4, {"pipe_size": 2, "tp_size": 2}),
}


def check(found: list[Record], expected: Record) -> None:
    for record in found:
        assert record.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                record[name].double(),
                value.double(),
                rtol=1e-5,
                atol=1e-7,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize(
    ("grid", "clips", "holds"),
    [
        *[(grid, number % 2 == 0, number % 2 == 1) for number, grid in enumerate(GRIDS)],
        ("copies, states over all", True, False),
        ("level 1, mean", True, False),
        ("pp x tp", True, False),
    ],
)
def test_a_training_with_counts_is_that_of_plain_torch_on_every_grid(
    grid: str, clips: bool, holds: bool
) -> None:
    ranks, init = GRIDS[grid]
    found = run_ranks(of_ranks, ranks, "SGD", clips=clips, holds=holds, init=init)
    check(found, of_plain_torch("SGD", clips=clips))


@pytest.mark.parametrize(
    ("kind", "ranks", "clips"),
    [(kind, (2, 4)[number % 2], number % 2 == 0) for number, kind in enumerate(OPTIMIZERS)],
)
def test_every_kind_of_optimizer_steps_by_the_divided_gradients(
    kind: str, ranks: int, clips: bool
) -> None:
    found = run_ranks(of_ranks, ranks, kind, clips=clips, loss_scale=2.0**10)
    check(found, of_plain_torch(kind, clips=clips))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.gpu
def test_on_gpus_a_training_with_counts_is_that_of_plain_torch(kind: str, ranks: int) -> None:
    options: Any = {"clips": True, "holds": kind == "SGD", "loss_scale": 2.0**10}
    found = run_ranks(of_ranks, ranks, kind, **options, init={"device": "cuda"})
    check(found, of_plain_torch(kind, clips=True))


@pytest.mark.parametrize("kind", ["AdamW", "offload"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.gpu
def test_on_gpus_the_host_waits_for_no_count(kind: str, ranks: int) -> None:
    losses = run_ranks(without_waiting, ranks, kind, init={"device": "cuda", "zero_level": 2})
    assert len(set(losses)) == 1 and losses[0] < 2.4
