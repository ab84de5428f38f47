"""Checkpoints of models that were made on the meta device and have no values yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bmt_checkpoint import load, save
from bmt_core.errors import CheckpointError
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing import run_ranks


class Holder(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        # One rank of four holds nothing of it, and must say the same as the others.
        self.weight = DistributedParameter(torch.empty(3, device="meta"))


def message_of_save(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(Holder(), path)
    return str(caught.value)


def test_an_uninitialized_parameter_cannot_be_saved_on_any_rank(tmp_path: Path) -> None:
    for message in run_ranks(message_of_save, 4, str(tmp_path / "model.pt")):
        assert "weight" in message and "made on the meta device" in message
    assert not (tmp_path / "model.pt").exists()


def loaded(path: str, around: str) -> list[float]:
    with torch.device(around):
        holder = Holder()
        load(holder, path)
    values: list[float] = holder.weight.tolist()
    return values


@pytest.mark.parametrize("around", ["cpu", "meta"])
def test_a_checkpoint_gives_values(around: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.tensor([3.0, 4.0, 5.0])}, tmp_path / "model.pt")
    assert run_ranks(loaded, 4, str(tmp_path / "model.pt"), around) == [[3.0, 4.0, 5.0]] * 4
