"""The rules for an axis of the grid of ranks: each test is one.

What an axis is, its place in the grid and whether its ranks see the same data, it declares itself.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core.run.bmtrain_names import argument_for
from bmt_core.run.runtime import current, is_initialized
from bmt_core.settings import MeshAxis
from bmt_params.locality import Locality
from bmt_params.modules.declared_locality import set_locality
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing.conformance.offer import Offer
from bmt_testing.conformance.offered_axis import OfferedAxis
from bmt_testing.decorator import on_ranks
from bmt_testing.pool import rank_pool, run_ranks
from bmt_testing.settings import TrainingSettings
from bmt_testing.trainings import require

RANKS = 4
SIZES = (2, 3, 4)
DATA_ORDER = 50  # of the axis "dp"


@pytest.fixture(scope="module")
def axis(offer: Offer) -> OfferedAxis:
    """The axis under test."""
    return OfferedAxis(offer)


def _in_pairs(world_size: int, axis: OfferedAxis) -> dict[str, Any]:
    return axis.run_settings(2)


def test_it_has_the_size_that_is_asked_for(axis: OfferedAxis) -> None:
    for size in SIZES:
        assert axis.of_size(size).size == size


def test_it_is_not_there_unless_it_is_asked_for(axis: OfferedAxis) -> None:
    found = axis.by_default()
    assert found is None or found.size == 1, f"every run has {found}"


def test_it_is_the_same_axis_at_every_size(axis: OfferedAxis) -> None:
    kinds = {(each.order, each.shards_data, each.splits_sum) for each in map(axis.of_size, SIZES)}
    assert len(kinds) == 1, f"(order, shards_data, splits_sum): {sorted(kinds)}"


@on_ranks(RANKS, init=_in_pairs)
def test_ranks_lie_in_the_grid_as_its_order_says(axis: OfferedAxis) -> None:
    topology, places = current().topology, _places(axis.of_size(2))
    for number, along in enumerate((axis.name, "dp")):
        assert topology.axis_size(along) == 2
        indices = [topology.axis_rank(along, rank) for rank in range(RANKS)]
        assert indices == [place[number] for place in places], f"indices along {along}"
        assert sorted(topology.ranks({along})) == sorted(_groups(places, fixed=1 - number))


@on_ranks(RANKS, init=_in_pairs)
def test_every_rank_has_one_group_along_it(axis: OfferedAxis) -> None:
    topology, own = current().topology, current().rank
    places = _places(axis.of_size(2))
    for number, along in enumerate((axis.name, "dp")):
        (expected,) = [ranks for ranks in _groups(places, fixed=1 - number) if own in ranks]
        group = topology.group({along})
        assert group.ranks == expected and group.ranks[group.rank] == own
        total = torch.tensor(2**own)
        group.all_reduce(total).wait()
        assert total.item() == sum(2**rank for rank in expected), f"ranks along {along}"


def test_a_world_that_its_size_does_not_divide_is_refused_on_every_rank(axis: OfferedAxis) -> None:
    for outcome in rank_pool(3).outcomes(_nothing, init=axis.run_settings(2)):
        assert outcome.error_type == "ConfigError", outcome.error_message
        message = outcome.error_message
        assert "3 ranks cannot be divided by " in message and "=2" in message, message
        assert argument_for(axis.name) in message, message


TRAININGS = {
    "sums": TrainingSettings(
        ranks=RANKS, levels=(3, 1), micro_batches=2, gradients="sum", max_norm=0.05
    ),
    "means": TrainingSettings(ranks=RANKS, levels=(2,), optimizer="adam"),
}


@pytest.mark.parametrize("gradients", TRAININGS)
def test_ranks_train_as_one_process_in_plain_torch(axis: OfferedAxis, gradients: str) -> None:
    kind = axis.of_size(2)
    if kind.splits_sum and not kind.shards_data:
        counted = replace(TRAININGS[gradients], gradients="sum")
        axis.compare_training(PartsModel, batch, declared_whole, counted)
    else:
        axis.compare_training(Model, batch, declared_whole, TRAININGS[gradients])


@on_ranks(RANKS, init=_in_pairs)
def test_ranks_that_compute_the_same_rows_draw_the_same_dropout(axis: OfferedAxis) -> None:
    mask = Noise()(torch.ones(64))
    masks = torch.empty(RANKS * 64)
    current().world.all_gather(masks, mask).wait()
    places = _places(axis.of_size(2))
    for (one, first), (other, second) in itertools.combinations(
        zip(places, masks.view(RANKS, 64), strict=True), 2
    ):
        is_same = one[1] == other[1] and not axis.of_size(2).splits_sum
        assert torch.equal(first, second) == is_same, f"ranks at {one} and {other} (axis, dp)"
    # Whatever makes parameters draws from this generator, which is that of all ranks.
    drawn = torch.rand(4)
    of_first = drawn.clone()
    current().world.broadcast(of_first, 0).wait()
    assert torch.equal(drawn, of_first), "torch's generator has another state than on rank 0"


def test_what_one_size_saves_another_loads(axis: OfferedAxis, tmp_path: Path) -> None:
    require("bmt-checkpoint", "This rule of --bmt-axis")
    path = str(tmp_path / "model.pt")
    run_ranks(_save, RANKS, axis, path, init=axis.run_settings(2))
    for ranks, size in ((1, 1), (2, 1), (RANKS, RANKS)):
        for found in run_ranks(_load, ranks, axis, path, init=axis.run_settings(size)):
            for name, value in _values(1.0).items():
                assert torch.equal(found[name], value), f"{name} at size {size} on {ranks} ranks"


class Noise(DistributedModule):
    """Dropout, as a model that bmt knows draws it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x + torch.tanh(self.linear(x)))
        return normed


class Model(nn.Module):
    """A model whose layers may be those of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.first(x)))
        return (found - y).square().mean()


class PartsModel(Model):
    """A model of which ranks that read the same batch compute parts: each some of its rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for name in current().topology.parts_axes if is_initialized() else ():
            size, index = current().topology.axis_size(name), current().topology.axis_rank(name)
            x, y = x.chunk(size)[index], y.chunk(size)[index]
        return super().forward(x, y) * len(x), len(x)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of all ranks."""
    return torch.randn(8, 4), torch.randn(8, 3)


def declared_whole(model: nn.Module) -> nn.Module:
    """Say that each rank along axes of the same loss computes the whole gradient."""
    for name in current().topology.same_loss_axes:
        set_locality(model, Locality(name, gradients="whole"))
    return model


def _nothing() -> None:
    pass


def _places(axis: MeshAxis) -> list[tuple[int, int]]:
    """Return each rank's index along the axis and along ``dp``, by counting."""
    indices = range(axis.size), range(RANKS // axis.size)
    if (axis.order, axis.name) < (DATA_ORDER, "dp"):
        return list(itertools.product(*indices))
    return [(index, data) for data, index in itertools.product(*reversed(indices))]


def _groups(places: list[tuple[int, int]], *, fixed: int) -> list[tuple[int, ...]]:
    """Return the ranks that are alike in one of the indices, for each of its values."""
    values = {place[fixed] for place in places}
    return [
        tuple(rank for rank, place in enumerate(places) if place[fixed] == value)
        for value in values
    ]


def _save(axis: OfferedAxis, path: str) -> None:
    require("bmt-checkpoint").save(_parameters(axis, 1.0), path)


def _load(axis: OfferedAxis, path: str) -> dict[str, torch.Tensor]:
    model = _parameters(axis, 0.0)
    require("bmt-checkpoint").load(model, path)
    params: dict[str, Any] = dict(model.named_parameters())
    return {name: p.gather_all().detach().clone() for name, p in params.items()}


def _values(factor: float) -> dict[str, torch.Tensor]:
    shapes = {"rows": (8, 3), "columns": (3, 8), "usual": (7, 5), "copies": (5,)}
    return {
        name: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * factor
        for name, shape in shapes.items()
    }


def _parameters(axis: OfferedAxis, factor: float) -> nn.Module:
    """Return parameters that are cut along the axis, sharded over it, and the same on its ranks."""
    topology, model = current().topology, DistributedModule()
    size, index = topology.axis_size(axis.name), topology.axis_rank(axis.name)
    localities: dict[str, list[Locality]] = {
        "rows": [Locality(axis.name, split_dim=0)],
        "columns": [Locality(axis.name, split_dim=1)],
        "usual": [],
        "copies": [Locality(axis.name, gradients="whole")],
    }
    for name, value in _values(factor).items():
        for locality in localities[name]:
            if locality.split_dim is not None:
                value = locality.cut(value, index, size)
        model.register_parameter(name, DistributedParameter(value, locality=localities[name]))
    return model
