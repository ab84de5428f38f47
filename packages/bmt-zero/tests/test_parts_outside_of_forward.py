"""Parameters of Blocks that are read outside of the Block's forward, and what hangs on them inside
of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bmt_core import ConfigError
from bmt_core.run.runtime import world_size
from bmt_params import whole_parameters
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


class Scaled(nn.Module):
    """Reads attributes of its parameters, as muP does; has a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gain = nn.Parameter(torch.ones(4))
        self.gain.scale = 3.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain: Any = self.gain
        out: torch.Tensor = x + self.norm(torch.tanh(self.inner(x))) * gain * gain.scale
        return out * getattr(self.inner.weight, "shift", 1.0)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.last = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


X = torch.linspace(-1, 1, 12).view(3, 4)


def losses(model: Any, change: Any = lambda model, step: None) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        change(model, step)
        loss = (model(X) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def change_attributes(model: Any, step: int) -> None:
    for layer in (*model.layers, model.last):
        parameters = dict(layer.named_parameters())
        if step == 1:
            parameters["inner.weight"].shift = 0.5
        if step == 2:
            parameters["gain"].scale = 2.0
        if step == 3:
            del parameters["inner.weight"].shift


@on_ranks(4, init={"gradients": "mean"})
@cells(("level", "recomputes"), [(0, False), (2, True), (3, False), (3, True)])
def test_forward_and_recomputation_read_the_attributes_that_the_parameter_has(
    level: int, recomputes: bool
) -> None:
    plain, model = Net(), Net()
    for layer in model.layers:
        Block(layer, zero_level=level, use_checkpoint=recomputes)
    BMTrainModelWrapper(model)
    expected = losses(plain, change_attributes)
    torch.testing.assert_close(losses(model, change_attributes), expected)


class Kept(nn.Parameter):
    """A class of parameters with something of its own."""


@on_ranks(2)
def test_a_class_of_parameters_is_refused_when_wrapped_and_afterwards() -> None:
    model = Net()
    model.layers[1].gain = Kept(torch.ones(4))
    with pytest.raises(ConfigError, match="is a Kept, a subclass of"):
        BMTrainModelWrapper(model)
    with pytest.raises(ConfigError, match="is a Kept"):
        Block(model.layers[1])
    wrapped = BMTrainModelWrapper(Net())
    wrapped.layers[0].gain = Kept(torch.ones(4))
    with pytest.raises(ConfigError, match="is a Kept"):
        wrapped(X)


def penalty(weights: Any) -> torch.Tensor:
    """Orthogonality, norms of rows, cosine, distance, softmax."""
    first, second = weights
    orthogonal = (first @ first.t() - torch.eye(4)).square().sum()
    rows = first.norm(dim=1).sum() + torch.cosine_similarity(first, second).sum()
    return orthogonal + rows + torch.dist(first, second) + first.softmax(-1).amax(0).sum()


@on_ranks(4, init={"gradients": "mean"})
@cells("level", range(4))
def test_a_penalty_of_gathered_weights_trains_as_in_plain_torch(level: int) -> None:
    plain, model = Net(), Net()
    for layer in model.layers:
        Block(layer, zero_level=level)
    BMTrainModelWrapper(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    for _ in range(3):
        wholes = [layer.inner.weight.gather() for layer in model.layers]  # type: ignore[union-attr, operator]
        weights = [layer.inner.weight for layer in plain.layers]  # type: ignore[union-attr]
        loss = [
            (m(X) - 1).square().mean() + penalty(w) for m, w in ((plain, weights), (model, wholes))
        ]
        torch.testing.assert_close(loss[1], loss[0])
        for optimizer, value in zip(optimizers, loss, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(1, 2)
def test_a_layer_s_other_method_and_a_submodule_called_alone_raise_the_same() -> None:
    model = BMTrainModelWrapper(Net())
    layer: Any = model.layers[0]
    of_matrices: list[Any] = [layer.score, layer.inner]
    of_vectors: list[Any] = [layer.norm, lambda x: x * layer.gain]  # which one rank has whole
    for call in of_matrices if world_size() == 1 else of_matrices + of_vectors:
        with pytest.raises(ConfigError, match=r"another method or in one of its submodules") as e:
            call(X)
        assert "layers.0." in str(e.value) and "gather()" in str(e.value)
    with pytest.raises(ConfigError, match=r"^t\(\) would"):
        penalty([layer.inner.weight, layer.inner.weight])
    torch.testing.assert_close(model.last.score(X), model.last.inner(X))
    with whole_parameters(layer):
        penalty([layer.inner.weight, layer.inner.weight])


@on_ranks(2, init={"gradients": "mean"})
@cells("cache", [False, True])
def test_steps_inside_one_autocast_region_recompute_with_present_weights(cache: bool) -> None:
    def train(model: nn.Module, *, cached: bool) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return losses(model)

    expected = train(Net(), cached=False)
    for recomputes in (False, True):
        model = Net()
        for layer in model.layers:
            Block(layer, use_checkpoint=recomputes)
        found = train(BMTrainModelWrapper(model), cached=cache)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
