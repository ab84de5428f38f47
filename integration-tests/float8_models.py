"""A small model whose layers compute in float8, by torchao."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 8, 16


class Layer(nn.Module):
    """A gated feed-forward layer. ``tied``: the two products of its input share a weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if tied:
            self.gate.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h)))
        return out


class Gpt(nn.Module):
    """Returns the loss of tokens (batch, length + 1). ``tied``: head and embedding share a weight,
    too.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*[Layer(tied=tied) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def in_float8(module: nn.Module, recipe: str = "tensorwise", *, emulate: bool = True) -> nn.Module:
    """Convert the linear layers in ``module``; the recipe "gathered" is "tensorwise" with weights
    that are gathered in float8. ``emulate``: numbers are rounded to float8 and multiplied
    in float32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    is_gathered = recipe == "gathered"
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("tensorwise" if is_gathered else recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=is_gathered,
    )
    return convert_to_float8_training(module, config=config)


def float8_gpt(recipe: str, *, tied: bool = False, emulate: bool = True) -> Gpt:
    """Return a model whose layers compute in float8, and its head does not."""
    model = Gpt(tied=tied)
    in_float8(model.layers, recipe, emulate=emulate)
    return model


def tensorwise() -> Gpt:
    return float8_gpt("tensorwise")


def tied() -> Gpt:
    return float8_gpt("tensorwise", tied=True)


def gathered() -> Gpt:
    return float8_gpt("gathered")


def tied_gathered() -> Gpt:
    return float8_gpt("gathered", tied=True)


def rowwise() -> Gpt:
    return float8_gpt("rowwise")


def rowwise_with_gw_hp() -> Gpt:
    return float8_gpt("rowwise_with_gw_hp")


def batch(seed: int) -> torch.Tensor:
    """Return the tokens of all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
