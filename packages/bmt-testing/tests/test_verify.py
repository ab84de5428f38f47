"""``bmt verify``: its exit status, what it prints, its report, and one line for each error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import verified_models
from click.testing import CliRunner, Result

from bmt_testing import TrainingSettings, hugging_face
from bmtrain._program import main

MODULE = verified_models.__name__


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


def test_a_model_that_matches_is_reported_with_all_that_was_drawn(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--world", "1,2", "--levels", "0,3", "--examples", "5", "--steps", "1"]
    result = verify(f"{MODULE}:Model", *options, "--report", str(report))
    assert result.exit_code == 0, result.output
    reference = "one process of plain torch on the whole batch"
    assert f"{MODULE}:Model: 5 trainings equal {reference}. " in result.output
    content = json.loads(report.read_text())
    assert content["result"] == "matches" and content["failure"] is None
    assert content["compared_with"] == reference
    drawn = [eval(example["settings"]) for example in content["examples"]]
    assert len({repr(settings) for settings in drawn}) == 5
    assert {settings.ranks for settings in drawn} <= {1, 2}
    assert {level for settings in drawn for level in settings.levels} <= {0, 3}
    by_ranks = content["drawn"]["ranks"]
    assert by_ranks == {
        str(ranks): sum(settings.ranks == ranks for settings in drawn)
        for ranks in sorted({settings.ranks for settings in drawn})
    }
    # The loss of every micro-batch, on every rank.
    losses = sum(settings.ranks * settings.micro_batches for settings in drawn)
    assert content["compared"]["losses"] >= losses
    elements = sum(p.numel() for p in verified_models.Model().parameters())
    assert content["compared"]["parameters"] >= elements * sum(each.ranks for each in drawn)
    assert "│ losses" in result.output and "│ ranks" in result.output


def test_the_first_difference_is_shrunk_and_the_exit_status_is_1(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--world", "1,2", "--steps", "1", "--parallelize", "enlarge_gradients_of_the_head"]
    result = verify(f"{MODULE}:Model", *options, "--report", str(report))
    assert result.exit_code == 1, result.output
    assert "first: gradient of head.weight in step 0, on rank 0" in result.output
    assert "settings: TrainingSettings(ranks=2)" in result.output
    assert "repeat in a shell: " in result.output
    failure = json.loads(report.read_text())["failure"]
    assert failure["settings"] == repr(TrainingSettings(ranks=2))
    assert failure["example"] > 0 and failure["simpler_tried"] > 0


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1}),
        ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}),
    ],
)
def test_a_configuration_of_hugging_face_is_cut_down_and_matches(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    made = hugging_face.small_causal_lm(str(tmp_path))
    assert type(made).__name__.lower().startswith(model_type)
    assert sum(p.numel() for p in made.parameters()) < 100_000
    if model_type == "llama":
        options = ["--world", "2", "--examples", "2", "--steps", "1"]
        result = verify("--hf-config", str(tmp_path), *options)
        assert result.exit_code == 0, result.output
        assert "2 trainings equal one process of plain torch on the whole batch. " in result.output


ERRORS = [
    (["no_such_module:model"], "'no_such_module' cannot be imported: ModuleNotFoundError"),
    ([MODULE], "is not MODULE:FACTORY. Write for example my_model:make_model"),
    ([f"{MODULE}:Modle"], f"No function of {MODULE} is named 'Modle'. Did you mean 'Model'?"),
    ([f"{MODULE}:number"], "is a int, and model_fn is a function"),
    ([f"{MODULE}:Model", "--batch", "tokens"], "There is no function for batch_fn."),
    (
        [f"{MODULE}:ModelWithDropout"],
        "the output of the model (ModelWithDropout) differs between two runs with the same values"
        " and batch, but other random numbers, first in the operation aten::bernoulli_",
    ),
    (
        [f"{MODULE}:ModelThatFails"],
        "ModelThatFails failed: KeyError: 'nothing of that name' (verified_models.py, line ",
    ),
    ([f"{MODULE}:Model", "--batch", "three_rows", "--world", "2"], "a batch of 3 rows, which 2"),
    ([f"{MODULE}:Model", "--axis", "ep=1,2"], "axis_sizes"),
    ([f"{MODULE}:Model", "--axis", "tp=1,2"], "splits the model along 'tp'"),
    ([f"{MODULE}:Model", "--axis", "tp"], "'tp' is not an axis with its sizes, such as tp=1,2"),
    ([f"{MODULE}:Model", "--levels", "7"], "zero_level"),
    ([f"{MODULE}:Model", "--world", "one"], "'one' is not a list of numbers, such as 1,2,4"),
    ([f"{MODULE}:Model", "--world", "0"], "ranks must be a number, at least 1, not 0"),
    ([f"{MODULE}:Model", "--report", "no/folder/r.json"], "there is no folder no/folder"),
    (["--hf-config", ".", "--loss", "loss"], "name functions of MODULE, and --hf-config has none"),
    ([], "Give one of MODULE:FACTORY and --hf-config DIR"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_what_cannot_be_compared_is_one_line_and_the_exit_status_is_2(
    arguments: list[str], message: str
) -> None:
    result = verify(*arguments, "--examples", "3", "--steps", "1")
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert message in line
    assert result.output.splitlines()[-1] == line


def test_ranks_that_have_no_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = verify(f"{MODULE}:Model", "--device", "cuda", "--world", "1,4")
    assert result.exit_code == 2
    assert "needs GPUs for 4 ranks, and this machine has those for 1" in result.output


def test_transformers_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    result = verify("--hf-config", str(tmp_path))
    assert result.exit_code == 2
    assert "--hf-config needs transformers, which is not installed" in result.output
