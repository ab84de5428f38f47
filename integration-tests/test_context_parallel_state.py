"""Optimizers and checkpoints of trainings whose sequences are divided (bmt-cp), beside bmt in one
process, which other tests compare with plain torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from context_models import Model, batch, split_along_tp

import bmtrain as bmt
from bmt_testing import TrainingSettings, assert_matches_single, run_ranks
from bmt_zero import Block, BMTrainModelWrapper

Result = tuple[list[float], dict[str, torch.Tensor]]
KIND = "documents"
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "dp 2": (2, {}),
    "cp 2": (2, {"cp_size": 2}),
    "cp 4": (4, {"cp_size": 4}),
    "cp 2 x dp 2": (4, {"cp_size": 2}),
    "cp 2 x copies 2, states over all": (
        4,
        {"cp_size": 2, "shard_size": 1, "optimizer_shards": "all"},
    ),
}


def training(optimizer: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = Model(KIND).double()
    for layer in model.layers:
        Block(layer)
    BMTrainModelWrapper(model)
    manager = bmt.optim.OptimManager()
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = "layers" in name and "norm" not in name and name.endswith("weight")
        (matrices if is_matrix and optimizer == "muon" else others).append(parameter)
    if matrices:
        manager.add_optimizer(bmt.optim.whole(torch.optim.Muon, matrices, lr=1e-2))
    kind = bmt.optim.AdamOffloadOptimizer if optimizer == "adam_offload" else torch.optim.AdamW
    manager.add_optimizer(kind(others, lr=1e-2))
    return model, manager


def steps(model: torch.nn.Module, manager: Any, numbers: range) -> Result:
    """Train on eight sequences, of which each rank along ``dp`` has some."""
    losses, topology = [], bmt.current().topology
    for step in numbers:
        torch.manual_seed(step)
        own = [x.chunk(topology.data_size)[topology.data_rank] for x in batch(KIND, step)]
        loss, count = model(*own)
        manager.backward(loss, count=count)
        manager.step()
        manager.zero_grad()
        losses.append(bmt.mean_loss(loss, count=count).item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def whole(optimizer: str) -> Result:
    return steps(*training(optimizer), range(3))


def saved(folder: Path) -> Result:
    model, manager = training("adam")
    steps(model, manager, range(2))
    bmt.save_checkpoint(folder, model, manager, step=2)
    return steps(model, manager, range(2, 4))


def loaded(folder: Path) -> Result:
    model, manager = training("adam")
    bmt.load_checkpoint(folder, model, manager)
    return steps(model, manager, range(2, 4))


def on_grid(grid: str, function: Any, argument: Any) -> list[Result]:
    ranks, options = GRIDS[grid]
    found: list[Result] = run_ranks(function, ranks, argument, init={**options, "seed": 0})
    return found


def check(found: list[Result], expected: Result) -> None:
    for losses, values in found:
        assert losses == pytest.approx(expected[0], rel=1e-11)
        torch.testing.assert_close(values, expected[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("optimizer", "grid"), [("muon", "cp 2 x dp 2"), ("adam_offload", "cp 4")])
def test_optimizers_step_as_in_one_process(optimizer: str, grid: str) -> None:
    (expected,) = on_grid("1 rank", whole, optimizer)
    for each in (grid, "cp 2 x copies 2, states over all"):
        check(on_grid(each, whole, optimizer), expected)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [("cp 2", ("1 rank", "cp 2 x copies 2, states over all")), ("cp 2 x dp 2", ("dp 2", "cp 4"))],
)
def test_other_grids_go_on_from_a_checkpoint(
    saving: str, loading: tuple[str, str], tmp_path: Path
) -> None:
    expected, *_ = on_grid(saving, saved, tmp_path)
    for grid in loading:
        check(on_grid(grid, loaded, tmp_path), expected)


@pytest.mark.slow("bmt-cp", "bmt-zero", "bmt-pipeline", "bmt-tp")
@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_sequence_over_stages_and_split_layers_trains_as_in_one_process(kind: str) -> None:
    settings = TrainingSettings(
        ranks=8, axes={"cp": 2, "tp": 2, "pp": 2}, gradients="sum", levels=(3,), recompute=(True,)
    )
    assert_matches_single(
        partial(Model, kind),
        partial(batch, kind),
        settings=settings,
        parallelize=split_along_tp,
        pipeline="layers",
    )
