"""Evaluation and prediction give the metrics of the whole data set on every rank, whatever
its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from trainer_runs import (
    RUN,
    accelerate_forgets,
    bmt_trainer,
    model_of,
    padded,
    plain_trainer,
    rows,
    without_times,
)
from transformers import DataCollatorWithFlattening

from bmt_testing import run_ranks

SIZES = (12, 13, 11, 3, 1)


def evaluated(trainer: Any) -> dict[int, Any]:
    with accelerate_forgets():
        found: dict[int, Any] = {}
        for size in SIZES:
            (metrics,) = without_times([trainer.evaluate(rows(size, 2))])
            prediction = trainer.predict(rows(size, 3))
            found[size] = (
                metrics,
                prediction.predictions,
                prediction.label_ids,
                without_times([prediction.metrics])[0],
            )
        return found


def evaluated_by_bmt(folder: str, options: dict[str, Any]) -> dict[int, Any]:
    return evaluated(bmt_trainer(folder, options))


@pytest.mark.parametrize("world_size", [1, 4])
def test_metrics_and_predictions_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    expected = evaluated(plain_trainer(tmp_path, world_size, {}))
    for found in run_ranks(evaluated_by_bmt, world_size, str(tmp_path), {}, init=RUN):
        for size in SIZES:
            (
                (metrics, logits, labels, of_test),
                (all_metrics, all_logits, all_labels, all_of_test),
            ) = (
                found[size],
                expected[size],
            )
            assert logits.shape[0] == size
            numpy.testing.assert_allclose(logits, all_logits, rtol=1e-4, atol=1e-6)
            numpy.testing.assert_array_equal(labels, all_labels)
            assert (
                metrics["eval_accuracy"] == all_metrics["eval_accuracy"]
                and metrics["eval_count"] == size
            )
            assert of_test["test_accuracy"] == all_of_test["test_accuracy"]
            # The last batches are filled up with rows from the beginning, which do not count.
            assert metrics["eval_loss"] == pytest.approx(all_metrics["eval_loss"], rel=1e-5)
            assert of_test["test_loss"] == pytest.approx(all_of_test["test_loss"], rel=1e-5)


def of_two_sets(folder: str) -> list[str]:
    with accelerate_forgets():
        trainer = bmt_trainer(
            folder, {"eval_dataset": {"a": rows(5), "b": rows(4)}, "prediction_loss_only": True}
        )
        return sorted(key for key in trainer.evaluate() if key.endswith("_loss"))


def test_several_data_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    assert (
        run_ranks(of_two_sets, 2, str(tmp_path), init=RUN) == [["eval_a_loss", "eval_b_loss"]] * 2
    )


class WithImages(torch.nn.Module):
    """A language model that adds the mean of a row's images, which lie in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.language = model_of()

    def forward(
        self,
        input_ids: torch.Tensor,
        image_counts: torch.Tensor,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        **numbers: Any,
    ) -> Any:
        assert len(images) == image_counts.sum(), "images must be those of the rows"
        means = torch.stack([each.mean(0) for each in torch.split(images, image_counts.tolist())])
        hidden = self.language.get_input_embeddings()(input_ids) + means[:, None]
        return self.language(inputs_embeds=hidden, labels=labels, **numbers)


def with_images(batch: list[dict[str, Any]]) -> dict[str, Any]:
    found = padded(batch)
    del found["attention_mask"]
    counts = [len(row["input_ids"]) % 3 + 1 for row in batch]
    images = [
        (torch.arange(16.0) + index) / 16
        for row, count in zip(batch, counts, strict=True)
        for index in range(count)
    ]
    return {**found, "image_counts": torch.tensor(counts), "images": torch.stack(images)}


UNCUT: dict[str, dict[str, Any]] = {
    "rows in one": {"data_collator": DataCollatorWithFlattening()},
    "images of all rows": {"data_collator": with_images, "model": WithImages},
}


def losses_of_uncut(trainer_of: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with accelerate_forgets():
        for name, options in UNCUT.items():
            trainer = trainer_of({**options, "compute_metrics": None, "prediction_loss_only": True})
            found[name] = [trainer.evaluate(rows(size, 2))["eval_loss"] for size in SIZES]
    return found


def losses_by_bmt(folder: str) -> dict[str, list[float]]:
    return losses_of_uncut(lambda options: bmt_trainer(folder, options))


def test_last_batches_that_cannot_be_cut_count_each_row_once(tmp_path: Path) -> None:
    expected = losses_of_uncut(lambda options: plain_trainer(tmp_path, 4, options))
    for found in run_ranks(losses_by_bmt, 4, str(tmp_path), init=RUN):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def two_documents(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Each row is two documents: positions begin anew inside of rows."""
    halves = []
    for row in batch:
        cut = len(row["input_ids"]) // 2
        halves += [{key: value[:cut] for key, value in row.items()}]
        halves += [{key: value[cut:] for key, value in row.items()}]
    flat: dict[str, torch.Tensor] = DataCollatorWithFlattening()(halves)
    return flat


def losses_of_documents(folder: str) -> tuple[float, float]:
    """Of 5 rows, which the first 3 fill up to 8; and of these 8."""
    options = {"data_collator": two_documents, "compute_metrics": None}
    with accelerate_forgets():
        trainer = bmt_trainer(folder, options)
        data = rows(5, 2)
        with pytest.warns(UserWarning, match="4 positions in it are 0"):
            loss = trainer.evaluate(data)["eval_loss"]
        return loss, trainer.evaluate(data + data[:3])["eval_loss"]


def test_rows_that_are_not_told_from_each_other_are_warned_of(tmp_path: Path) -> None:
    for found, of_filled in run_ranks(losses_of_documents, 4, str(tmp_path), init=RUN):
        assert found == pytest.approx(of_filled, rel=1e-5)


class WithoutLength(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(5, 2))


def counts_without_length(folder: str) -> list[float]:
    """The rows that an evaluation counts, if one rank reads them, and if all do."""
    with accelerate_forgets():
        found = []
        for each_rank in (False, True):
            options = {"accelerator_config": {"dispatch_batches": not each_rank}}
            trainer = bmt_trainer(folder, options)
            warns: Any = pytest.warns(UserWarning, match="has no length")
            with warns if each_rank else nullcontext():
                found.append(trainer.evaluate(WithoutLength())["eval_count"])
        return found


def test_rows_of_data_without_length_that_count_again_are_warned_of(tmp_path: Path) -> None:
    for found in run_ranks(counts_without_length, 2, str(tmp_path), init=RUN):
        assert found == [5, 8]
