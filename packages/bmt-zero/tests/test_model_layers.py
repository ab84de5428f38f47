"""Layers in Sequential and ModuleDict become Blocks, as those of torchvision, timm and torchtitan
hold them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zero_models import grads_of, of_all_ranks

from bmt_core.run import runtime
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.model_layers import describe_blocks, layers_of
from cells import cells

STEPS, SAMPLES = 3, 8


class Bottleneck(nn.Module):
    """A residual block as torchvision's ResNet has it, with a nested Sequential."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))
            if out != channels
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        return torch.relu(self.norm(self.conv(x)) + kept)


class ResNet(nn.Module):
    """Two Sequentials of residual blocks between single layers, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Bottleneck(4, 4), Bottleneck(4, 4))
        self.layer2 = nn.Sequential(Bottleneck(4, 6), Bottleneck(6, 6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))
        return out


class Feed(nn.Module):
    """Attention's residual neighbour: a norm and a nested Sequential of plain layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class VisionTransformer(nn.Module):
    """Layers in a Sequential, as in timm; their names may be other than numbers, as
    in torchvision.
    """

    def __init__(self, names: str) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.place = nn.Parameter(torch.randn(1, 4, 6))
        self.blocks = nn.Sequential()
        for index in range(3):
            self.blocks.add_module(names.format(index), Feed(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(
            self.blocks(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1)
        )
        return out


class Llama(nn.Module):
    """Layers in a ModuleDict, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3 * 64, 6)
        self.layers = nn.ModuleDict({str(index): Feed(6) for index in range(3)})
        self.output = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(x.flatten(1))
        for layer in self.layers.values():
            hidden = layer(hidden)
        out: torch.Tensor = self.output(hidden)
        return out


def sequence_of(layers: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 64, 6), *(Feed(6) for _ in range(layers)), nn.Linear(6, 5)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "torchvision's ResNet": (ResNet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
    "timm's ViT": (lambda: VisionTransformer("{}"), ["blocks.0", "blocks.1", "blocks.2"]),
    "torchvision's ViT": (
        lambda: VisionTransformer("layer_{}"),
        [f"blocks.layer_{index}" for index in range(3)],
    ),
    "torchtitan's Llama": (Llama, ["layers.0", "layers.1", "layers.2"]),
    "a Sequential": (lambda: sequence_of(2), ["2", "3"]),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batches(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(STEPS, SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (STEPS, SAMPLES), generator=generator)
    share = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    return [(picture[share], label[share]) for picture, label in zip(pictures, labels, strict=True)]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for pictures, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(4, init={"gradients": "mean", "device": "cpu"})
@cells("name", MODELS)
def test_layers_in_other_containers_become_blocks_and_train_like_plain_torch(
    name: str, world_size: int
) -> None:
    plain, model = built(name), BMTrainModelWrapper(built(name))
    assert [path for path, module in model.named_modules() if isinstance(module, Block)] == MODELS[
        name
    ][1]
    expected = train(plain, batches(0, 1))
    # Statistics of a batch norm are those of a rank: there all ranks have one batch.
    found = train(model, batches(0, 1) if "ResNet" in name else batches(runtime.rank(), world_size))
    mean = torch.tensor(of_all_ranks(found), dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(grads_of(model), grads_of(plain))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


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
    assert found == ["towers.student.2", "towers.student.3", "towers.teacher.2", "towers.teacher.3"]


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
    twin = copy.deepcopy(BMTrainModelWrapper(ResNet()))
    assert sum(isinstance(module, Block) for module in twin.modules()) == 4
