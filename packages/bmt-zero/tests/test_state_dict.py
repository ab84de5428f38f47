"""State dicts of whole tensors: what Blocks and wrapped models load, refuse, and read of old
checkpoints through hooks.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Model, line

import bmt_checkpoint
from bmt_core import ConfigError
from bmt_core.run.runtime import rank, world_size
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


class Nested(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.own = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.own.sum(0)
        return y


@on_ranks(2)
@cells("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_whole_tensors_load_also_after_a_change_of_dtype(dtype: torch.dtype) -> None:
    block = Block(Nested(world_size())).to(dtype)
    given = Nested(99).to(dtype).state_dict()
    before = {key: value.clone() for key, value in given.items()}
    block.load_state_dict(given)
    torch.testing.assert_close(dict(block.state_dict()), before)
    torch.testing.assert_close(dict(given), before)  # the user's dict is left alone
    with pytest.raises(
        RuntimeError, match=r"own: the checkpoint has shape \(3, 2\), the model \(2, 3\)"
    ):
        block.load_state_dict({**given, "own": torch.zeros(3, 2, dtype=dtype)})
    assert block(torch.ones(4, 5, dtype=dtype)).dtype == dtype
    assert {parameter.dtype for parameter in block.parameters()} == {dtype}


@on_ranks(2)
@cells("wrap", [Block, BMTrainModelWrapper])
def test_assigning_whole_tensors_is_refused(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="assign=True"):
        wrap(line()).load_state_dict(line().state_dict(), assign=True)


class ReadsOldCheckpoints(nn.Linear):
    """Its weight was called kernel and saved transposed: an override transposes, a
    pre-hook renames.
    """

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_load_state_dict_pre_hook(rename)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}kernel"] = state[f"{prefix}kernel"].t()
        super()._load_from_state_dict(state, prefix, *args)


def rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def negate(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}weight"] = -state[f"{prefix}weight"]


def rename_child(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}head.kernel"] = state.pop(f"{prefix}old.kernel")


class ReadsOldModel(nn.Module):
    """Layers that read old checkpoints inside of a Block, one of them under two names, as a Block,
    and outside of Blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
        inside = nn.ModuleDict({"one": ReadsOldCheckpoints(), "normed": normed})
        inside["same"] = inside["one"]
        self.layers, self.head = (
            nn.ModuleList([inside, ReadsOldCheckpoints()]),
            ReadsOldCheckpoints(),
        )
        self.register_load_state_dict_pre_hook(rename_child)

    def negate(self) -> ReadsOldModel:
        """Register a further hook with every layer."""
        for module in [
            module for module in self.modules() if isinstance(module, ReadsOldCheckpoints)
        ]:
            module.register_load_state_dict_pre_hook(negate)
        return self

    @staticmethod
    def old_state(seed: int) -> dict[str, torch.Tensor]:
        """Return a state dict of old names, with the entries of the old ``weight_norm``."""
        torch.manual_seed(seed)
        state = {
            "layers.0.normed.weight_g": torch.rand(6, 1),
            "layers.0.normed.weight_v": torch.randn(6, 6),
        }
        for path in ("layers.0.one", "layers.1", "head"):
            kernel = "old.kernel" if path == "head" else f"{path}.kernel"
            state |= {kernel: torch.randn(6, 6), f"{path}.bias": torch.randn(6)}
        return {
            **state,
            **{f"layers.0.same.{key}": state[f"layers.0.one.{key}"] for key in ("kernel", "bias")},
        }


def assert_loads_like(plain: nn.Module, model: nn.Module, seed: int, **options: Any) -> None:
    model.load_state_dict(ReadsOldModel.old_state(seed), **options)
    plain.load_state_dict(ReadsOldModel.old_state(seed))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@on_ranks(2)
def test_hooks_and_overrides_that_read_old_checkpoints_see_whole_tensors() -> None:
    plain, model = ReadsOldModel(), BMTrainModelWrapper(ReadsOldModel())
    assert_loads_like(plain, model, 1)
    assert_loads_like(plain, model, 2, strict=False)
    # Hooks registered after a load.
    assert_loads_like(ReadsOldModel().negate(), copy.deepcopy(model).negate(), 3)
    assert_loads_like(plain, model, 4)
    torch.save(model.layers[1], file := io.BytesIO())
    file.seek(0)
    layer = torch.load(file, weights_only=False)
    old = torch.randn(6, 6, generator=torch.Generator().manual_seed(5))
    layer.register_load_state_dict_pre_hook(negate)
    layer.load_state_dict({"kernel": old, "bias": torch.zeros(6)})
    torch.testing.assert_close(layer.state_dict()["weight"], -old.t(), rtol=0, atol=0)


@on_ranks(2)
def test_after_a_load_that_failed_the_next_one_is_right() -> None:
    plain, model = ReadsOldModel(), BMTrainModelWrapper(ReadsOldModel())
    state = ReadsOldModel.old_state(1)
    with pytest.raises(KeyError, match=r"layers\.1\.kernel"):  # after the first Block was loaded
        model.load_state_dict(
            {key: value for key, value in state.items() if key != "layers.1.kernel"}
        )
    assert_loads_like(plain.negate(), model.negate(), 2)
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ConfigError, match="assign=True"):
        model.layers[0]["one"].load_state_dict(
            {"kernel": torch.ones(6, 6), "bias": torch.ones(6)}, assign=True
        )
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({**state, "layers.0.one.kernel": torch.ones(3, 2)})
    _, *complaints = str(caught.value).split("\n\t")
    assert complaints == [
        'Missing key(s) in state_dict: "layers.0.one.weight". ',
        "layers.0.one.weight: the checkpoint has shape (2, 3), the model (6, 6).",
    ]
    assert_loads_like(plain, model, 3)


@on_ranks(2)
def test_a_file_loads_after_a_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = (Model().state_dict() for _ in range(2))
    model = BMTrainModelWrapper(Model())
    model.load_state_dict(first)
    torch.testing.assert_close(dict(model.state_dict()), dict(first), rtol=0, atol=0)
    path = str(tmp_path / "model.pt")
    if rank() == 0:
        torch.save(second, path)
    bmt_checkpoint.load(model, path)
    torch.testing.assert_close(dict(model.state_dict()), dict(second), rtol=0, atol=0)
