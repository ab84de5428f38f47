"""Evaluation and prediction give the metrics of the whole data set on every rank, whatever
its size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("transformers", minversion="5.23")

from trainer_runs import RUN, accelerate_forgets, bmt_trainer, plain_trainer, rows, without_times

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
