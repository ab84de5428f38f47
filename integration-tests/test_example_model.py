"""The example's GPT against the same GPT in plain torch; its evaluation and its text on any number
of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from verified_example import (
    SIZES,
    PlainGPT,
    as_example,
    as_example_without_checkpoints,
    batch,
    next_token_loss,
)

import bmtrain as bmt
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks, run_ranks
from bmtrain._program import main
from evaluation import Evaluation
from generation import generate
from models import GPT
from windows import Windows

LENGTH = SIZES["max_distance"]


@pytest.mark.parametrize(
    ("settings", "parallelize"),
    [
        (TrainingSettings(ranks=2, micro_batches=4, no_sync=True), as_example_without_checkpoints),
        (
            TrainingSettings(ranks=2, axes={"tp": 2}, levels=(2,), optimizer="adam"),
            as_example_without_checkpoints,
        ),
        (TrainingSettings(ranks=4, levels=(3,), gradients="sum", max_norm=0.5), as_example),
        (TrainingSettings(ranks=4, axes={"tp": 2}, levels=(3,), micro_batches=2), as_example),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_gpt_trains_as_in_plain_torch(settings: TrainingSettings, parallelize: Any) -> None:
    assert_matches_single(
        PlainGPT, batch, settings=settings, loss_fn=next_token_loss, parallelize=parallelize
    )


def initial_values(chunks: int) -> dict[str, torch.Tensor]:
    model = GPT(**{**SIZES, "num_layers": 4}, dtype=torch.float32, chunks=chunks)
    torch.manual_seed(3)
    bmt.init_parameters(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("ranks", "chunks", "init"), [(4, 1, {"tp_size": 2}), (2, 2, {"pipe_size": 2})]
)
def test_first_values_are_those_of_plain_torch_also_where_stages_have_several_parts(
    ranks: int, chunks: int, init: dict[str, int]
) -> None:
    expected = PlainGPT(num_layers=4).state_dict()
    of_ranks = run_ranks(initial_values, ranks, chunks, init=init)
    assert {name for values in of_ranks for name in values} == expected.keys()
    for values in of_ranks:
        assert {
            name: value for name, value in values.items() if not torch.equal(value, expected[name])
        } == {}


@on_ranks(2)
def test_no_mask_means_a_full_one_and_padding_is_not_read() -> None:
    model = GPT(**SIZES, dtype=torch.float32)
    bmt.init_parameters(model)
    inputs, pos, _ = batch(0)
    changed = inputs.clone()
    changed[:, 7:] = 0
    with torch.no_grad():
        logits, masked = model(inputs, pos), model(inputs, pos, torch.ones_like(pos).bool())
        padded = model(changed, pos, pos < 7)
    torch.testing.assert_close(masked, logits)
    torch.testing.assert_close(padded[:, :7], logits[:, :7])
    assert padded.isfinite().all()


# --- evaluation and generation ---


def evaluation_and_sample(num_windows: int) -> tuple[float, bytes]:
    model = GPT(**{**SIZES, "vocab_size": 256}, dtype=torch.float32)
    bmt.init_parameters(model)
    text = torch.randint(
        256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    evaluate = Evaluation(Windows(text, LENGTH), num_windows)
    assert evaluate(model) == evaluate(model)
    # Cold, so that the logits and not the random numbers decide.
    return evaluate(model), generate(model, b"ab", length=20, context=LENGTH, temperature=0.05)


def test_evaluation_and_sample_are_identical_on_any_number_of_ranks() -> None:
    # 150 windows are 5 batches, the last one smaller: on 4 ranks three have none left in the
    # second round.
    results = [
        result for ranks in (1, 2, 4) for result in run_ranks(evaluation_and_sample, ranks, 150)
    ]
    assert len(set(results)) == 1
    loss, sample = results[0]
    assert loss == pytest.approx(5.5, abs=0.3)
    assert sample.startswith(b"ab")
    assert len(sample) == 22
    along_tp = [
        result
        for ranks in (2, 4)
        for result in run_ranks(evaluation_and_sample, ranks, 150, init={"tp_size": 2})
    ]
    assert len(set(along_tp)) == 1
    assert along_tp[0] == (pytest.approx(loss, rel=1e-6), sample)
    assert set(run_ranks(evaluation_and_sample, 4, 150, init={"pipe_size": 2})) == {results[0]}


def test_drawn_trainings_match() -> None:
    names = ["--loss", "next_token_loss", "--parallelize", "as_example"]
    sizes = ["--world", "2", "--examples", "3", "--steps", "2"]
    command = ["verify", "verified_example:PlainGPT", *names, *sizes]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
