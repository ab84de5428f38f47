"""``assert_matches_single`` passes models and loops as users write them, and finds one mistake of
each kind.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner
from document_code import ROOT, code, run
from hypothesis import given
from own_models import RIGHT, TWO, WIDTH, WRONG, Classifier, numbers, rows_of_a_loop
from torch import nn

from bmt_testing import (
    TrainingSettings,
    assert_matches_single,
    property_settings,
    training_settings,
)
from bmtrain._program import main


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(case: dict[str, Any]) -> None:
    assert_matches_single(**case, steps=2, settings=TWO)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("case", "said"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_found_and_named(case: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_matches_single(**case, steps=2, settings=TWO)
    message = str(caught.value)
    assert re.search(said, message), message


COMMANDS = {
    "Vae --batch numbers --noise": "that takes the ranks' rows and random numbers one by one",
    "batch_norm --batch numbers --reference parts": "that takes the ranks' rows one by one",
    "SequenceFirst --batch tokens_sequence_first --loss next_tokens_sequence_first --batch-dim 1": (
        "one process of plain torch on the whole batch"
    ),
    "Classifier --batch rows_of_a_loop --train plain_loop --gradients mean": (
        "the same loop in one process of plain torch"
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", COMMANDS)
def test_the_command_says_what_is_compared(options: str) -> None:
    command = ["verify", *f"own_models:{options}".split(), "--world", "2"]
    result = CliRunner().invoke(main, [*command, "--examples", "2", "--steps", "1"])
    assert result.exit_code == 0, result.output
    assert re.search(f"2 trainings equal .*{COMMANDS[options]}", result.output), result.output
    # A loop decides about that itself.
    assert ("clipped" in result.output) == ("--train" not in options)


@pytest.mark.ranks(2)
def test_of_a_failing_property_simpler_settings_are_tried_and_no_others() -> None:
    tried: list[TrainingSettings] = []

    @property_settings(max_examples=30)
    @given(drawn=training_settings(ranks=(2,)))
    def compare(drawn: TrainingSettings) -> None:
        tried.append(drawn)
        assert_matches_single(**WRONG["scales a gradient"][0], steps=2, settings=drawn)

    with pytest.raises(AssertionError, match=r"settings: TrainingSettings\(ranks=2\)"):
        compare()
    # At most 30 s if each takes 3 s. Hypothesis by itself tries to find other errors, and to
    # explain the simplest.
    assert len(tried) <= 10


train = run(code("docs/verify.md", 1))["train"]
train.__module__ = __name__  # where ranks import it from


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("settings", [TWO, TrainingSettings(ranks=4, shard_size=2, levels=(2,))])
def test_the_loop_in_the_documents_passes(settings: TrainingSettings) -> None:
    assert_matches_single(Classifier, rows_of_a_loop, train=train, settings=settings)


def test_the_table_in_the_documents_has_every_mistake() -> None:
    page = (ROOT / "tools" / "mutation_scores.md").read_text()
    section = page.split("## In models and loops")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| .* \| .+ \|$", section, re.M)
    assert rows == list(WRONG)


ON_GPUS: dict[str, dict[str, Any]] = {
    "statistics of all ranks": {
        "model_fn": partial(Classifier, partial(nn.SyncBatchNorm, WIDTH)),
        "batch_fn": numbers,
    },
    **{name: RIGHT[name] for name in ("diffusion", "contrastive", "loop of a manager")},
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", ON_GPUS.values(), ids=ON_GPUS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_is_right_passes_on_gpus(case: dict[str, Any], dtype: Any) -> None:
    settings = dataclasses.replace(TWO, dtype=dtype)
    assert_matches_single(**case, steps=2, settings=settings, device="cuda")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["batch norm", "noise", "equal rows"])
def test_a_mistake_is_found_and_named_on_gpus(name: str) -> None:
    case, said = WRONG[name]
    with pytest.raises(AssertionError, match=said):
        assert_matches_single(**case, steps=2, settings=TWO, device="cuda")
