"""What errors say of the place where a checkpoint was looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bmt_checkpoint
from bmt_checkpoint.missing_checkpoint import lies_there
from bmt_core.errors import CheckpointError
from bmt_testing import run_ranks


def test_a_directory_holds_its_first_names_and_a_number_of_others(tmp_path: Path) -> None:
    assert lies_there(tmp_path) == f"{tmp_path} is empty."
    for number in range(10):
        (tmp_path / f"step-{number}").mkdir()
    first = ", ".join(f"step-{number}" for number in range(8))
    assert lies_there(tmp_path) == f"{tmp_path} holds {first} and 2 more."
    absent = tmp_path / "step-3" / "a" / "b"
    assert lies_there(absent) == f"{absent} does not exist; {tmp_path / 'step-3'} is empty."


def test_a_relative_path_is_shown_as_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").touch()
    assert lies_there(Path("other.pt")) == (
        f"{tmp_path / 'other.pt'} does not exist; {tmp_path} holds model.pt."
    )
    assert lies_there(Path("model.pt")) == f"{tmp_path} holds model.pt."


def load_each(paths: list[str]) -> list[str]:
    import torch

    messages = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            bmt_checkpoint.load(torch.nn.Linear(2, 2), path)
        messages.append(str(caught.value))
    return messages


def test_every_format_says_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    names = ["model.pt", "model.safetensors", "model.dcp"]
    paths = [*(os.fspath(tmp_path / name) for name in names), os.fspath(tmp_path / "empty")]
    for messages in run_ranks(load_each, 2, paths):
        for path, message in zip(paths, messages, strict=True):
            holds = f"{path} does not exist; {tmp_path} holds empty, notes.txt."
            expected = f"{path} is empty." if path.endswith("empty") else holds
            assert expected in message, message
