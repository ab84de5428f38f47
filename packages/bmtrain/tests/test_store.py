"""The names of BMTrain's store."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmt_core
import bmt_params
from bmt_testing import on_ranks, run_ranks
from bmtrain import store

needs_zero = pytest.mark.skipif(find_spec("bmt_zero") is None, reason="bmt-zero is not installed")


def model() -> bmt_params.DistributedModule:
    made = bmt_params.DistributedModule()
    made.weight = bmt_params.DistributedParameter(torch.arange(7.0))
    made.register_buffer("steps", torch.tensor(3))
    made.add_module("head", bmt_params.DistributedModule())
    made.head.weight = made._parameters["weight"]
    return made


def saved_to_rank_0() -> list[dict[str, Any]]:
    first = store._save_to_rank0(model())
    second: OrderedDict[str, Any] = OrderedDict(other=1)
    assert store._save_to_rank0(model(), second, "model.") is second
    return [
        {name: getattr(v, "tolist", lambda v=v: v)() for name, v in state.items()}
        for state in (first, second)
    ]


def test_whole_tensors_are_on_rank_0_only() -> None:
    whole = list(range(7))
    zero, *others = run_ranks(saved_to_rank_0, 4)
    assert zero == [
        {"weight": whole, "steps": 3, "head.weight": whole},
        {"other": 1, "model.weight": whole, "model.steps": 3, "model.head.weight": whole},
    ]
    assert others == [[{}, {"other": 1}]] * 3


class SavesByBmt(bmt_params.DistributedModule):
    """As libraries written for BMTrain do: ``state_dict`` calls bmt's store."""

    def __init__(self) -> None:
        from bmt_zero import Block

        super().__init__()
        self.block = Block(nn.Linear(2, 3))
        self.inner = model()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return store._save_to_rank0(self)


def overridden(path: str) -> tuple[dict[str, Any], bool]:
    # torch's own walk calls the override, of a part of the model.
    outer = nn.ModuleDict({"part": SavesByBmt()})
    state = outer.part.state_dict()
    store.save(outer, path)
    outer.part.block.weight.data.zero_()
    store.load(outer, path)
    weight = outer.part.block._parameters["weight"].gather()
    return dict(state), bmt_core.rank() > 0 or bool(weight.equal(state["block.weight"]))


@needs_zero
def test_a_module_may_call_the_store_in_its_state_dict(tmp_path: Path) -> None:
    (zero, equal), (one, _) = run_ranks(overridden, 2, str(tmp_path / "model.pt"))
    assert equal and one == {}
    file = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {f"part.{name}" for name in zero} == {*file} and len(file) == 5
    assert all(file[f"part.{name}"].equal(value) for name, value in zero.items())


class Inference:
    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def load_layer_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.states.append(state)


def saved_to_hosts() -> tuple[Any, Any]:
    """On the first ranks of two hosts of two ranks."""
    from bmt_zero import TransformerBlockList

    run = bmt_core.current()
    run.launch = dataclasses.replace(run.launch, local_rank=run.rank % 2, local_world_size=2)
    whole = model()
    whole.layers = TransformerBlockList([nn.Linear(1, 2), nn.Linear(2, 1)])
    inference = Inference()
    store._save_to_infer_model(whole, inference, None, "net.")
    state = store._save_to_local_rank0(whole)
    in_parts = {name: value for state in inference.states for name, value in state.items()}
    assert {f"net.{name}" for name in state} == {*in_parts}
    assert all(in_parts[f"net.{name}"].equal(value) for name, value in state.items())
    return state.get("weight"), [sorted(state) for state in inference.states]


@needs_zero
def test_the_first_rank_of_every_host_gets_whole_tensors_and_layers() -> None:
    zero, one, two, three = run_ranks(saved_to_hosts, 4)
    for weight, layers in (zero, two):
        assert weight.tolist() == list(range(7))
        assert layers[:2] == [[f"net.layers.{n}.bias", f"net.layers.{n}.weight"] for n in (0, 1)]
        assert layers[2:] == [["net.head.weight", "net.steps", "net.weight"]]
    assert one == three == (None, [])


@on_ranks(2)
def test_objects_of_different_sizes_travel() -> None:
    rank, world = bmt_core.rank(), bmt_core.current().world
    sent = store.broadcast_object({"from": rank, "text": "x" * 10 ** (rank + 1)}, world, src=1)
    assert sent == {"from": 1, "text": "x" * 100}
    assert store.allgather_objects([rank] * rank) == [[], [1]]
