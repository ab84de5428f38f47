"""The names of BMTrain's store."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import bmt_core
from bmt_core.testing import run_ranks
from bmtrain import store


def model() -> bmt_core.DistributedModule:
    made = bmt_core.DistributedModule()
    made.weight = bmt_core.DistributedParameter(torch.arange(7.0))
    made.register_buffer("steps", torch.tensor(3))
    made.add_module("head", bmt_core.DistributedModule())
    made.head.weight = made._parameters["weight"]
    return made


def saved_to_rank_0() -> list[dict[str, Any]]:
    first = store._save_to_rank0(model())
    second: OrderedDict[str, Any] = OrderedDict(other=1)
    assert store._save_to_rank0(model(), second, "model.") is second
    return [{name: getattr(v, "tolist", lambda v=v: v)() for name, v in state.items()} for state in (first, second)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_tensors_are_on_rank_0_only(world_size: int) -> None:
    whole = list(range(7))
    zero, *others = run_ranks(saved_to_rank_0, world_size)
    assert zero == [
        {"weight": whole, "steps": 3, "head.weight": whole},
        {"other": 1, "model.weight": whole, "model.steps": 3, "model.head.weight": whole},
    ]
    assert others == [[{}, {"other": 1}]] * (world_size - 1)


def exchanged() -> tuple[Any, Any]:
    rank = bmt_core.rank()
    sent = store.broadcast_object({"from": rank, "text": "x" * (10 ** (rank + 1))}, bmt_core.current().world, src=1)
    return store.allgather_objects([rank] * rank), (sent["from"], len(sent["text"]))


def test_objects_of_different_sizes_travel() -> None:
    assert run_ranks(exchanged, 2) == [([[], [1]], (1, 100))] * 2


def saved_and_loaded(path: str) -> list[float]:
    store.save(model(), path)
    other = model()
    other._parameters["weight"].data.zero_()
    store.load(other, path)
    with torch.no_grad():
        return other.weight.tolist()  # type: ignore[no-any-return]


def test_save_and_load_are_bmts(tmp_path: Path) -> None:
    assert run_ranks(saved_and_loaded, 2, str(tmp_path / "model.pt")) == [list(range(7))] * 2
