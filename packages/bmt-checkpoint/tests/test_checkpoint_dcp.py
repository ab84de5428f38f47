"""Directories of ``torch.distributed.checkpoint``: what bmt writes loads in plain torch, and what
plain torch wrote loads here.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from test_checkpoint import distributed_net, plain_net, whole_state
from torch import nn
from torch.distributed import checkpoint as dcp

import bmt_checkpoint
from bmt_core.errors import CheckpointError
from bmt_testing import run_ranks
from bmtrain._program import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_both_ways(folder: str) -> None:
    """Twice by bmt, so that a directory is replaced; and by torch, in files of both ranks."""
    bmt_checkpoint.save(distributed_net(seed=2), f"{folder}/ours.dcp")
    bmt_checkpoint.save(distributed_net(seed=1), f"{folder}/ours.dcp", non_blocking=True)
    bmt_checkpoint.wait_for_saves()
    dcp.save(plain_net(seed=1).state_dict(), checkpoint_id=f"{folder}/torchs")


def load_all(paths: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        model = distributed_net()
        bmt_checkpoint.load(model, path)
        found.append(whole_state(model))
    return found


def test_what_torch_writes_loads_here_and_what_is_written_here_loads_in_torch(
    tmp_path: Path,
) -> None:
    pytest.importorskip("numpy", reason="torch gathers objects by numpy")
    run_ranks(save_both_ways, 2, str(tmp_path), timeout=180)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.dcp", "torchs"]
    expected = whole_state(plain_net(seed=1))
    state = plain_net(seed=3).state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "ours.dcp", no_dist=True)
    model = plain_net()
    model.load_state_dict(state)
    assert whole_state(model) == expected
    assert (
        run_ranks(load_all, 2, [str(tmp_path / "ours.dcp"), str(tmp_path / "torchs")], timeout=180)
        == [[expected] * 2] * 2
    )

    for source, target in (("torchs", "model.safetensors"), ("model.safetensors", "again.dcp")):
        assert (
            CliRunner()
            .invoke(main, ["checkpoint", "convert", *(str(tmp_path / n) for n in (source, target))])
            .exit_code
            == 0
        )
    bmt_checkpoint.load(model := plain_net(), tmp_path / "again.dcp")
    assert whole_state(model) == expected


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_an_extra_state_comes_back_as_it_was_or_is_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    for value in (
        {"maxima": [one, [one + 1, {"step": 3}]], "names": ["a", "b"], "pair": (1, {2: 3})},
        [one, None],
        [],
    ):
        bmt_checkpoint.save(Extra(value), tmp_path / "model.dcp")
        bmt_checkpoint.load(other := Extra(None), tmp_path / "model.dcp")
        assert other.value == value
    for value in ({}, {1: "a"}, {"inside": [{}]}):
        with pytest.raises(CheckpointError, match=r"_extra_state has an empty dict, or.*NAME\.pt"):
            bmt_checkpoint.save(Extra(value), tmp_path / "model.dcp")
    bmt_checkpoint.load(other := Extra(None), tmp_path / "model.dcp")
    assert other.value == []  # the former checkpoint stays


class Attack:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["dcp", bmt_checkpoint.DcpFormat, bmt_checkpoint.DcpFormat()])
def test_the_format_can_be_asked_for_under_any_name(form: Any, tmp_path: Path) -> None:
    bmt_checkpoint.save(plain_net(seed=1), tmp_path / "model", format=form)
    # Recognised by what is in the directory.
    bmt_checkpoint.load(model := plain_net(), tmp_path / "model")
    assert whole_state(model) == whole_state(plain_net(seed=1))


def test_a_directory_that_is_damaged_or_hostile_is_an_error_that_names_it(tmp_path: Path) -> None:
    bmt_checkpoint.save(plain_net(seed=1), tmp_path / "model.dcp")
    metadata, (data,) = (
        tmp_path / "model.dcp" / ".metadata",
        (tmp_path / "model.dcp").glob("*.distcp"),
    )
    whole, values = metadata.read_bytes(), data.read_bytes()
    changes = {
        "posix.mkdir has no place": lambda: metadata.write_bytes(
            pickle.dumps(Attack(tmp_path / "attacked"))
        ),
        "this.s has no place": lambda: metadata.write_bytes(b"cthis\ns\n."),
        "Unpickling": lambda: metadata.write_bytes(b"nonsense"),
        "names the file '../x": lambda: metadata.write_bytes(
            whole.replace(data.name.encode(), b"../xx.distcp")
        ),
        "which is not there": lambda: data.unlink(),
        "cannot be read": lambda: data.write_bytes(values[: len(values) // 2]),
    }
    for message, change in changes.items():
        metadata.write_bytes(whole)
        data.write_bytes(values)
        change()
        with pytest.raises(CheckpointError, match=message):
            bmt_checkpoint.load(plain_net(), tmp_path / "model.dcp")
    assert not (tmp_path / "attacked").exists()
    assert "this" not in sys.modules  # a module of Python that prints when it is imported
    torch.save({"embedding": torch.zeros(7, 5)}, tmp_path / "file.dcp")
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        bmt_checkpoint.load(plain_net(), tmp_path / "file.dcp")
