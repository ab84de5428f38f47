"""Layers in Sequential and ModuleDict become Blocks, as those of torchvision, timm and torchtitan
hold them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zero_models import grads_of, my_part

from bmt_core.run import runtime
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.model_layers import describe_blocks, layers_of
from cells import cells


class Bottleneck(nn.Module):
    """A residual block as torchvision's ResNet has it, with a nested Sequential."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))


class Feed(nn.Module):
    """Attention's residual neighbour: a norm and a nested Sequential of plain layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


def resnet() -> nn.Module:
    """Two Sequentials of residual blocks between single layers, as in torchvision."""
    return nn.ModuleDict(
        {
            "conv1": nn.Conv2d(3, 4, 3),
            "layer1": nn.Sequential(Bottleneck(4, 4), Bottleneck(4, 4)),
            "layer2": nn.Sequential(Bottleneck(4, 6), Bottleneck(6, 6)),
            "fc": nn.Linear(6, 5),
        }
    )


def vision_transformer(names: str) -> nn.Module:
    """Layers in a Sequential, as in timm; their names may be other than numbers, as
    in torchvision.
    """
    model = nn.ModuleDict({"patch": nn.Conv2d(3, 6, 4), "blocks": nn.Sequential()})
    for index in range(3):
        model["blocks"].add_module(names.format(index), Feed(6))
    return model


class Llama(nn.Module):
    """Layers in a ModuleDict, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 6)
        self.layers = nn.ModuleDict({str(index): Feed(6) for index in range(3)})
        self.output = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(x)
        for layer in self.layers.values():
            hidden = layer(hidden)
        out: torch.Tensor = self.output(hidden)
        return out


class Encoder(nn.Module):
    """A list of levels without a forward, whose layers the model calls, as in autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output, level = nn.Linear(8, 6), nn.Linear(6, 5), nn.Module()
        level.norm, level.block = nn.LayerNorm(6), nn.ModuleList([Feed(6)])
        self.levels = nn.ModuleList([level, nn.ModuleList([Feed(6)])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, level = self.inputs(x), self.levels[0]
        out: torch.Tensor = self.output(self.levels[1][0](level.block[0](level.norm(x))))
        return out


def sequence_of(layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), *(Feed(6) for _ in range(layers)), nn.Linear(6, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "torchvision's ResNet": (resnet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
    "timm's ViT": (lambda: vision_transformer("{}"), ["blocks.0", "blocks.1", "blocks.2"]),
    "torchvision's ViT": (
        lambda: vision_transformer("layer_{}"),
        [f"blocks.layer_{index}" for index in range(3)],
    ),
    "torchtitan's Llama": (Llama, ["layers.0", "layers.1", "layers.2"]),
    "an autoencoder": (Encoder, ["levels.0.block.0", "levels.1.0"]),
    "a Sequential": (lambda: sequence_of(2), ["1", "2"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_other_containers_are_found(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(layer)] for layer in layers_of(model)] == expected


@on_ranks(4)
@cells("make", [Llama, Encoder, lambda: sequence_of(2)])
def test_layers_in_other_containers_become_blocks_and_train_like_plain_torch(
    make: Callable[[], nn.Module],
) -> None:
    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = make().double()
        expected = layers_of(model) if wraps else []
        run = BMTrainModelWrapper(model) if wraps else model
        assert [each for each in model.modules() if isinstance(each, Block)] == expected
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
            run(my_part(x) if wraps else x).square().sum().backward()
            optimizer.step()
        results.append([grads_of(model), dict(model.state_dict())])
    torch.testing.assert_close(results[1], results[0])


class Towers(nn.Module):
    """Two towers of one class: they are no layers, and their lists are."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"student": sequence_of(2), "teacher": sequence_of(2)})
        self.layer_pair = nn.ModuleDict({"first": Feed(4), "second": Feed(4)})
        self.heads = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def test_towers_and_single_layers_are_no_blocks() -> None:
    model = Towers()
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(layer)] for layer in layers_of(model)]
    assert found == ["towers.student.1", "towers.student.2", "towers.teacher.1", "towers.teacher.2"]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.more = nn.Sequential(Feed(4), Feed(4))


def test_lists_inside_of_a_layer_stay_inside() -> None:
    model = nn.Sequential(Mixture(), Mixture())
    assert layers_of(model) == list(model)


def test_a_layer_in_two_containers_is_one_layer() -> None:
    layers = [Feed(4), Feed(4)]
    model = nn.ModuleDict({"a": nn.ModuleList(layers), "b": nn.Sequential(*layers)})
    assert layers_of(model) == layers


OF_LISTS = "bmt: Sequential: 2 Blocks of up to 17 kB; 5 kB outside of Blocks are gathered together"


def with_layers() -> nn.Module:
    return BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 250), Feed(250), Feed(250)))


def test_wrapping_says_what_is_gathered_together(capfd: pytest.CaptureFixture[str]) -> None:
    runtime.init_distributed(device="cpu")
    try:
        capfd.readouterr()
        layers = with_layers()
        flat = BMTrainModelWrapper(
            nn.Sequential(nn.Linear(500, 500, bias=False), nn.Linear(500, 500, bias=False))
        )
        printed = capfd.readouterr().out.splitlines()
        assert printed == [describe_blocks(layers), describe_blocks(flat)]
    finally:
        runtime.shutdown()
    assert printed[0] == OF_LISTS
    assert printed[1].startswith(
        "bmt: Sequential: 0 Blocks, 2 MB of parameters are gathered together. Hold its layers in"
        " an nn.ModuleList"
    )


@on_ranks(2)
def test_every_rank_describes_the_whole() -> None:
    assert describe_blocks(with_layers()) == OF_LISTS


@on_ranks(1)
def test_copies_of_layers_of_a_wrapped_model_are_blocks_too() -> None:
    twin = copy.deepcopy(BMTrainModelWrapper(resnet()))
    assert sum(isinstance(module, Block) for module in twin.modules()) == 4
