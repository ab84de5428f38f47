"""Parameters that ranks share have the same names and shapes on all of them; if not, every rank raises and names the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bmt_checkpoint import save, save_checkpoint
from bmt_core.comm import all_gather_object
from bmt_core.errors import BmtError, CheckpointError, ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run import runtime
from bmt_core.settings import MeshAxis, RunSettings
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList


class Experts(nn.Module):
    """A layer with a router, which all ranks share, and one expert for each of ``names``."""

    def __init__(self, names: Sequence[str], width: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for name in names})

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


def error_of_wrapping(case: str) -> str:
    model = Model(lambda: layer_of(case))
    before = {name: type(p) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        BMTrainModelWrapper(model)
    assert {name: type(p) for name, p in model.named_parameters()} == before
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_wrapping_models_whose_parameters_differ_is_refused_on_every_rank_and_changes_nothing(
    run_ranks: Any, case: str
) -> None:
    first, second = run_ranks(error_of_wrapping, 2, case)
    of_first, of_second = (f"layers.0.{text}" if text != "nothing more" else "layers.1." for text in CASES[case])
    assert first == second
    assert first.startswith("Ranks wrap models of different parameters. Rank 0 has ")
    assert of_first in first and of_second in first and 'local_axes=("axis",)' in first


def errors_of_blocks(case: str, level: int, is_list: bool, path: str) -> tuple[str, str]:
    """What a training with Blocks that the program makes itself raises, and saving before any call."""
    make = (lambda: TransformerBlockList([Block(layer_of(case), zero_level=level)])) if is_list else None
    model = make() if make is not None else Block(layer_of(case), zero_level=level)
    with pytest.raises(CheckpointError) as of_save:
        save(model, path)
    with pytest.raises(ConfigError) as of_call:
        model(torch.ones(2, 4)).sum().backward()
    return str(of_call.value), str(of_save.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("level", "is_list"), [(0, False), (1, True), (2, False), (3, True)])
def test_blocks_whose_parameters_differ_do_not_train_and_are_not_saved(
    run_ranks: Any, tmp_path: Path, case: str, level: int, is_list: bool
) -> None:
    of_ranks = run_ranks(errors_of_blocks, 2, case, level, is_list, str(tmp_path / "model.pt"))
    for message in (text for texts in of_ranks for text in texts):
        for text in CASES[case]:
            assert text in message
        assert "local_axes" in message
    assert not list(tmp_path.iterdir())


class OwnAxis:
    """Adds an axis of two ranks, along which each may have modules of its own."""

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis("expert", 2, 100)]


def trained_with_declared(path: str) -> list[str]:
    """Train and save a model whose Blocks are the rank's own along ``expert``; return the names in the file."""
    runtime.init_distributed(device="cpu", plugins=[OwnAxis()], gradients="mean")
    index = runtime.current().topology.axis_rank("expert")
    layer = Block(Experts([f"e{index}"]), local_axes=("expert",))
    layer(torch.ones(2, 4)).sum().backward()
    save(nn.ModuleDict({f"layer-{index}": layer}), path)
    runtime.synchronize()
    runtime.shutdown()
    return list(torch.load(path, weights_only=True))


def test_modules_that_are_declared_local_may_differ(run_ranks: Any, tmp_path: Path) -> None:
    for names in run_ranks(trained_with_declared, 4, str(tmp_path / "model.pt"), init=None):
        assert "layer-0.experts.e0.0.weight" in names and "layer-1.experts.e1.0.weight" in names


def differing_beside_declared(path: str) -> str:
    """Save a model whose Blocks are declared local, with ranks that differ along another axis than the declared one."""
    runtime.init_distributed(device="cpu", plugins=[OwnAxis()])
    topology = runtime.current().topology
    names = [f"e{topology.axis_rank('expert')}-{topology.axis_rank('dp')}"]
    model = Block(Experts(names), local_axes=("expert",))
    with pytest.raises(BmtError) as caught:
        save_checkpoint(path, model)
    messages = all_gather_object(str(caught.value), runtime.current().world)
    assert messages == messages[:1] * 4
    runtime.shutdown()
    return messages[0]


def test_ranks_that_differ_along_another_axis_than_the_declared_one_do_not_save(run_ranks: Any, tmp_path: Path) -> None:
    for message in run_ranks(differing_beside_declared, 4, str(tmp_path), init=None):
        assert "Rank 0 has experts.e0-0.0.weight" in message and "where rank 2 has experts.e0-1.0.weight" in message


def error_of_saving_ordinary(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(layer_of("names"), path)
    return str(caught.value)


def test_ordinary_parameters_that_differ_between_ranks_are_not_saved(run_ranks: Any, tmp_path: Path) -> None:
    for message in run_ranks(error_of_saving_ordinary, 2, str(tmp_path / "model.pt")):
        assert "Rank 0 has experts.e0.0.weight" in message and "where rank 1 has experts.e2.0.weight" in message
