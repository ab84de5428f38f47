"""Orders of the data that are drawn from torch's own generator: all ranks together see each row
once per epoch, and in the same order after resuming.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from trainer_runs import RUN, accelerate_forgets, bmt_trainer, padded, rows, trained

import bmt_core
from bmt_testing import run_ranks


class WithoutLength(torch.utils.data.IterableDataset[Any]):
    """Rows in another order each time, drawn from torch's own generator."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(20)
        return iter([data[index] for index in torch.randperm(20).tolist()])


# 12 steps of an epoch on one rank, 6 on two; of data without length 5 steps of a pass on two ranks.
OPTIONS: dict[str, Any] = {"max_steps": 14, "save_strategy": "steps", "save_steps": 1}
ORDERS: dict[str, dict[str, Any]] = {
    "grouped by length": {"train_sampling_strategy": "group_by_length", "train_dataset": rows(24)},
    "without length": {"train_dataset": WithoutLength()},
}
STEPS = (2, 8, 13)


def trained_and_resumed(folder: str) -> list[tuple[str, int, Any, Any]]:
    """The losses of each step, by the whole training and by those from a checkpoint."""
    found = []
    with accelerate_forgets():
        for name, options in ORDERS.items():
            own = f"{folder}-{name}"
            whole = trained(bmt_trainer(own, {**OPTIONS, **options}))["log"]
            for step in STEPS:
                again = {**OPTIONS, **options, "save_strategy": "no"}
                resumed = trained(bmt_trainer(own, again), f"{own}/checkpoint-{step}")["log"]
                found.append((name, step, whole[:-1], resumed[:-1]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_order_goes_on_after_resuming(ranks: int, tmp_path: Path) -> None:
    for of_rank in run_ranks(trained_and_resumed, ranks, str(tmp_path / "run"), init=RUN):
        for name, step, whole, resumed in of_rank:
            assert len(whole) == OPTIONS["max_steps"]
            assert resumed == whole, f"{name} from step {step}"


class DrawingCollator:
    """Draws as many numbers as the longest row has, as those do that mask tokens."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        self.seen += [tuple(row["input_ids"]) for row in batch]
        torch.rand(max(len(row["input_ids"]) for row in batch))
        return padded(batch)


def rows_seen(folder: str) -> list[tuple[int, ...]]:
    collator = DrawingCollator()
    options = {"max_steps": -1, "num_train_epochs": 3, "data_collator": collator}
    with accelerate_forgets():
        bmt_trainer(folder, {**options, **ORDERS["grouped by length"]}).train()
    return collator.seen


def test_all_ranks_draw_one_order(tmp_path: Path) -> None:
    found = run_ranks(rows_seen, 2, str(tmp_path), init=RUN)
    expected = Counter(tuple(row["input_ids"]) for row in rows(24))
    for epoch in range(3):
        assert Counter(row for seen in found for row in seen[12 * epoch :][:12]) == expected


def own_orders(folder: str) -> list[tuple[int, ...]]:
    """The rows of a rank whose program gives each rank a loader of its own."""
    collator = DrawingCollator()
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"max_steps": 2})
        own = torch.Generator().manual_seed(bmt_core.rank())
        loader = torch.utils.data.DataLoader(
            trainer.train_dataset, 2, shuffle=True, generator=own, collate_fn=collator
        )
        trainer.get_train_dataloader = lambda: loader
        trainer.train()
    return collator.seen


def test_loaders_that_a_program_makes_keep_their_orders(tmp_path: Path) -> None:
    first, second = run_ranks(own_orders, 2, str(tmp_path), init=RUN)
    assert first != second


def resumed_on_one_rank(folder: str, rows_of_rank: int) -> str:
    options = {"max_steps": 5, "per_device_train_batch_size": rows_of_rank}
    with accelerate_forgets(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bmt_trainer(f"{folder}-other", options).train(f"{folder}/checkpoint-4")
    return " ".join(str(warning.message) for warning in caught)


def test_another_batch_of_all_ranks_is_warned_of_at_resuming(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(rows_of_four_steps, 2, folder, init=RUN)
    (same,) = run_ranks(resumed_on_one_rank, 1, folder, 4, init=RUN)
    (other,) = run_ranks(resumed_on_one_rank, 1, folder, 2, init=RUN)
    assert "epochs" not in same
    assert "was saved after 0.333 epochs" in other and "4 steps after 0.167" in other


def rows_of_four_steps(folder: str) -> None:
    with accelerate_forgets():
        bmt_trainer(folder, {**OPTIONS, "max_steps": 4}).train()
