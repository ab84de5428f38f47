"""Modules that a program changes after wrapping, as in plain torch: parameters assigned, removed,
renamed or recomputed from others are what is saved next and what the next forward computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval

import bmtrain as bmt
from bmt_core import CheckpointError, ConfigError
from bmt_testing import on_ranks
from cells import cells
from pairwise import pairwise

X = torch.linspace(-1, 1, 12).view(3, 4)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Renamed(nn.Linear):
    """Multiplies by ``kernel`` once ``weight`` has got that name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel if hasattr(self, "kernel") else self.weight
        return nn.functional.linear(x, kernel, self.bias)


def assign(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.linspace(0, 1, 16).view(4, 4))
    layer.bias = None


def delete_and_rename(layer: Any) -> None:
    weight = layer.weight
    del layer.weight
    layer.kernel = nn.Parameter(weight.detach() * 2)


def mask(layer: Any) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.remove(layer, "weight")


def parametrized(layer: Any) -> None:
    parametrize.register_parametrization(layer, "weight", Double(), unsafe=True)


def parametrized_and_not(layer: Any) -> None:
    parametrized(layer)
    parametrize.remove_parametrizations(layer, "weight")


def new_weight_norm(layer: Any) -> None:
    parametrizations.weight_norm(layer)


def old_weight_norm_removed(layer: Any) -> None:
    nn.utils.remove_weight_norm(layer)


def old_spectral_norm_removed(layer: Any) -> None:
    nn.utils.remove_spectral_norm(layer)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "assigned": (linear, assign),
    "renamed": (lambda: Renamed(4, 4), delete_and_rename),
    "pruned": (linear, mask),
    "parametrized": (linear, parametrized),
    "parametrized and not": (linear, parametrized_and_not),
    "weight norm": (linear, new_weight_norm),
    "weight norm removed": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), old_weight_norm_removed),
    "spectral norm removed": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        old_spectral_norm_removed,
    ),
}


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"inner": make()}) for _ in range(2))
        self.head = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def net(make: Callable[[], nn.Module]) -> Net:
    made = Net(make)
    made.layers = nn.ModuleList(Layer(layer["inner"]) for layer in made.layers)  # type: ignore[index]
    return made


def step(model: nn.Module) -> torch.Tensor:
    """One step of the loss on the whole batch, which every rank has; the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = (model(X) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def parts_to_change(model: Any) -> list[nn.Module]:
    return [model.layers[0].inner, model.head]


def saved_by_state_dict(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def saved_by_save(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    bmt.save(model, str(folder / "model.pt"))
    return dict(torch.load(folder / "model.pt"))


def saved_by_checkpoint(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    bmt.save_checkpoint(str(folder), model)
    path = bmt.latest(str(folder))
    assert path is not None
    files = sorted((Path(path) / "model").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@on_ranks(2, init={"gradients": "mean"}, timeout=120)
@cells(
    "change, level",
    [*((change, 3 * (n % 2)) for n, change in enumerate(CHANGES)), ("assigned", 3), ("pruned", 0)],
)
def test_what_is_saved_after_a_change_is_what_plain_torch_saves(
    change: str, level: int, tmp_path: Path
) -> None:
    make, act = CHANGES[change]
    plain = net(make)
    model = net(make)
    for layer in model.layers:
        bmt.Block(layer, zero_level=level)
    model = bmt.BMTrainModelWrapper(model)
    step(plain), step(model)
    for module in parts_to_change(plain):
        act(module)
    for module in parts_to_change(model):
        with bmt.whole_parameters(module):
            act(module)
    expected = plain.state_dict()
    for _ in range(2):  # the second time after a forward and a step
        for saved in (saved_by_state_dict, saved_by_save, saved_by_checkpoint):
            torch.testing.assert_close(saved(model, tmp_path), dict(expected))
        torch.testing.assert_close(step(model), step(plain))
        expected = plain.state_dict()


@on_ranks(2)
def test_a_load_after_an_assignment_fills_what_was_assigned() -> None:
    plain, model = net(linear), bmt.BMTrainModelWrapper(net(linear))
    assign(plain.layers[0].inner)
    assign(model.layers[0].inner)
    values = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(values)
    plain.load_state_dict(values)
    torch.testing.assert_close(dict(model.state_dict()), values)
    torch.testing.assert_close(model(X), plain(X))


@on_ranks(2)
def test_a_change_by_torch_outside_of_whole_parameters_names_them() -> None:
    for change in ("pruned", "parametrized", "weight norm"):
        make, act = CHANGES[change]
        model = bmt.BMTrainModelWrapper(net(make))
        before = dict(model.state_dict())
        for module in parts_to_change(model):
            with pytest.raises(ConfigError, match=r"whole_parameters\("):
                act(module)
        torch.testing.assert_close(dict(model.state_dict()), before)
        step(model)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.last = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            x = x + layer(x)
        return x


def fuse(layer: Any) -> None:
    layer[0] = fuse_conv_bn_eval(layer[0], layer[1])
    layer[1] = nn.Identity()


@on_ranks(2)
def test_norms_are_fused_into_convolutions_inside_of_whole_parameters() -> None:
    plain, model = Convolved().eval(), bmt.BMTrainModelWrapper(Convolved()).eval()
    x = torch.linspace(-1, 1, 24).view(2, 4, 3)
    torch.testing.assert_close(model(x), plain(x))
    for layer in (*plain.layers, plain.last):
        fuse(layer)
    for layer in (*model.layers, model.last):
        with bmt.whole_parameters(layer):
            fuse(layer)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(2)
def test_loading_wrapping_and_writing_work_in_inference_mode(tmp_path: Path) -> None:
    path = str(tmp_path / "ones.pt")
    torch.save({name: torch.ones_like(v) for name, v in net(linear).state_dict().items()}, path)
    trained = bmt.BMTrainModelWrapper(net(linear))
    bmt.save_checkpoint(str(tmp_path / "checkpoint"), trained)
    drawn = dict(trained.state_dict())
    with torch.inference_mode():
        bmt.load(trained, path)
        wrapped = bmt.BMTrainModelWrapper(net(linear))
        torch.testing.assert_close(wrapped(X), net(linear)(X))
        for module in (wrapped.layers[0], wrapped.head):
            with bmt.whole_parameters(module):
                for parameter in module.parameters():
                    parameter.fill_(1.0)
        wrapped.layers[1].load_state_dict(  # type: ignore[union-attr]
            {name: torch.ones(p.whole_shape) for name, p in wrapped.layers[1].named_parameters()}  # type: ignore[union-attr]
        )
    ones = {name: torch.ones_like(value) for name, value in net(linear).state_dict().items()}
    for model in (trained, wrapped):
        torch.testing.assert_close(dict(model.state_dict()), ones)
        step(model)  # trainable afterwards
    with torch.inference_mode():
        bmt.load_checkpoint(str(tmp_path / "checkpoint"), trained)
    torch.testing.assert_close(dict(trained.state_dict()), drawn)
    with torch.inference_mode():
        fresh = bmt.BMTrainModelWrapper(net(linear))
        fresh.head.weight.fill_(2.0)  # before the first call, a write to the copy takes effect
    assert fresh.state_dict()["head.weight"].eq(2.0).all()


class WithTable(nn.Linear):
    """Multiplies by a quantized table."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        kinds = (torch.qint8, torch.quint8)
        for name, kind in zip("ab", kinds, strict=True):
            self.register_buffer(name, torch.quantize_per_tensor(torch.eye(4), 0.1, 0, kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) @ self.a.dequantize() @ self.b.dequantize()
        return out


@on_ranks(2, init={"gradients": "mean"})
def test_quantized_buffers_work_and_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    plain, model = net(WithTable), bmt.BMTrainModelWrapper(net(WithTable))
    for _ in range(3):
        torch.testing.assert_close(step(model), step(plain))
    for save in (saved_by_save, saved_by_checkpoint):
        with pytest.raises(CheckpointError, match=r"is a quantized tensor.*persistent=False"):
            save(model, tmp_path)
    with pytest.raises(ConfigError, match="is a quantized buffer, which sync='rank0' cannot"):
        bmt.BMTrainModelWrapper(net(WithTable), sync="rank0")


def new_head(model: Any) -> None:
    model.head = nn.Linear(4, 4)


def new_layer(model: Any) -> None:
    model.layers[1] = Layer(nn.Linear(4, 4))


def new_parameter(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.full((4,), 0.5))


def new_module_in_front(model: Any) -> None:
    model.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), model.head)


def adapter(model: Any) -> None:
    model.layers[0].inner = nn.Sequential(model.layers[0].inner, nn.Linear(4, 4))


ADDITIONS = [new_head, new_layer, new_parameter, new_module_in_front, adapter]


@on_ranks(2, init={"gradients": "mean"})
@cells("change, managed", pairwise(ADDITIONS, [False, True]))
def test_what_is_put_into_a_wrapped_model_trains_as_in_plain_torch(
    change: Any, managed: bool, tmp_path: Path
) -> None:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))

    def train(model: Any, own: torch.Tensor, *, managed: bool) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer) if managed else None
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(own) - 1).square().mean()
            if managed:
                manager.backward(loss)
                manager.step()
            else:
                loss.backward()
                optimizer.step()

    plain, model = net(linear), bmt.BMTrainModelWrapper(net(linear))
    own = rows.chunk(bmt.world_size())[bmt.rank()]
    for _ in range(2):
        train(plain, rows, managed=False)
        train(model, own, managed=managed)
        torch.testing.assert_close(saved_by_save(model, tmp_path), dict(plain.state_dict()))
        for changed in (plain, model):
            torch.manual_seed(7)
            change(changed)
        assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), plain(x))
