"""Parameters that ranks share have the same names and shapes on all of them; if not, every rank
raises and names the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from zero_models import of_all_ranks

from bmt_checkpoint import save, save_checkpoint
from bmt_core import BmtError, CheckpointError, ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run import runtime
from bmt_core.settings import MeshAxis, RunSettings
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList
from cells import cells


class Experts(nn.Module):
    """A layer with a router, which all ranks share, and one expert for each of ``names``."""

    def __init__(self, names: Sequence[str], width: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for name in names}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.router(x)
        for expert in self.experts.values():
            y = y + expert(x)
        return y


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def layer_of(case: str) -> Experts:
    rank = runtime.rank()
    if case == "names":
        return Experts([f"e{2 * rank}", f"e{2 * rank + 1}"])
    if case == "order":
        return Experts(["a", "b"] if rank == 0 else ["b", "a"])
    if case == "number":
        return Experts(["a", "b"][: rank + 1])
    return Experts(["a"], width=4 if rank == 0 else 8)


CASES = {
    "names": ("experts.e0.0.weight of shape (4, 4)", "experts.e2.0.weight of shape (4, 4)"),
    "order": ("experts.a.0.weight of shape (4, 4)", "experts.b.0.weight of shape (4, 4)"),
    "number": ("nothing more", "experts.b.0.weight of shape (4, 4)"),
    "shapes": ("experts.a.0.weight of shape (4, 4)", "experts.a.0.weight of shape (8, 4)"),
}


@on_ranks(2)
@cells("case", CASES)
def test_wrapping_models_whose_parameters_differ_is_refused_on_every_rank_and_changes_nothing(
    case: str,
) -> None:
    model = Model(lambda: layer_of(case))
    before = {name: type(p) for name, p in model.named_parameters()}
    with pytest.raises(
        ConfigError, match=r"^Ranks wrap models of different parameters\. Rank 0 has "
    ) as caught:
        BMTrainModelWrapper(model)
    assert {name: type(p) for name, p in model.named_parameters()} == before
    for text in CASES[case]:
        assert (f"layers.0.{text}" if text != "nothing more" else "layers.1.") in str(caught.value)
    assert 'local_axes=("axis",)' in str(caught.value)
    assert of_all_ranks(str(caught.value)) == [str(caught.value)] * 2


@on_ranks(2)
@cells("case", CASES)
@cells(("level", "is_list"), [(0, False), (1, True), (2, False), (3, True)])
def test_blocks_whose_parameters_differ_do_not_train_and_are_not_saved(
    tmp_path: Path, case: str, level: int, is_list: bool
) -> None:
    block = Block(layer_of(case), zero_level=level)
    model = TransformerBlockList([block]) if is_list else block
    with pytest.raises(CheckpointError, match="local_axes") as of_save:
        save(model, str(tmp_path / "model.pt"))
    with pytest.raises(ConfigError, match="local_axes") as of_call:
        model(torch.ones(2, 4)).sum().backward()
    for text in CASES[case]:
        assert text in str(of_save.value) and text in str(of_call.value)
    assert not list(tmp_path.iterdir())


class OwnAxis:
    """Adds an axis of two ranks, along which each may have modules of its own."""

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis("expert", 2, 100)]


@on_ranks(4, init=None)
def test_modules_that_are_declared_local_may_differ(tmp_path: Path) -> None:
    runtime.init_distributed(device="cpu", plugins=[OwnAxis()], gradients="mean")
    index = runtime.current().topology.axis_rank("expert")
    layer = Block(Experts([f"e{index}"]), local_axes=("expert",))
    layer(torch.ones(2, 4)).sum().backward()
    save(nn.ModuleDict({f"layer-{index}": layer}), str(tmp_path / "model.pt"))
    runtime.synchronize()
    names = torch.load(tmp_path / "model.pt", weights_only=True).keys()
    assert {"layer-0.experts.e0.0.weight", "layer-1.experts.e1.0.weight"} <= names


@on_ranks(4, init=None)
def test_ranks_that_differ_along_another_axis_than_the_declared_one_do_not_save(
    tmp_path: Path,
) -> None:
    runtime.init_distributed(device="cpu", plugins=[OwnAxis()])
    topology = runtime.current().topology
    model = Block(
        Experts([f"e{topology.axis_rank('expert')}-{topology.axis_rank('dp')}"]),
        local_axes=("expert",),
    )
    with pytest.raises(
        BmtError,
        match=r"Rank 0 has experts\.e0-0\.0\.weight.*where rank 2 has experts\.e0-1\.0\.weight",
    ) as caught:
        save_checkpoint(tmp_path, model)
    assert of_all_ranks(str(caught.value)) == [str(caught.value)] * 4


@on_ranks(2)
def test_ordinary_parameters_that_differ_between_ranks_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"Rank 0 has experts\.e0\.0\.weight.*where rank 1 has experts\.e2\.0\.weight",
    ):
        save(layer_of("names"), str(tmp_path / "model.pt"))
