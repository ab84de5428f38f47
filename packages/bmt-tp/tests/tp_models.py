"""A transformer block in plain torch and of parallel layers, and what the tests of this
package share.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from bmt_core.run.runtime import current, is_initialized
from bmt_params import DistributedModule, DistributedParameter
from bmt_testing import on_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear, VPEmbedding, own_random_numbers

FEATURES, HEAD, VOCABULARY = 8, 2, 20


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that are alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


on_tp_ranks = functools.partial(on_ranks, init=lambda world_size: {"tp_size": world_size})
"""Run a test on ranks that are all along tp."""


def tp() -> tuple[int, int]:
    """This rank's index along tp, and how many there are."""
    return current().topology.axis_rank("tp"), current().topology.axis_size("tp")


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of the rows."""
    index, size = tp()
    return whole.chunk(size, 0)[index].clone()


def own_columns(whole: torch.Tensor, sections: tuple[int, ...] = ()) -> torch.Tensor:
    """This rank's part of the last dim."""
    index, size = tp()
    parts = whole.split(sections, -1) if sections else [whole]
    return torch.cat([part.chunk(size, -1)[index] for part in parts], -1)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DistributedParameter) and parameter.grad is not None, name
        found[name] = parameter.gather_all_like(parameter.grad).clone()
    return found


class Layer(nn.Module):
    """A pre-norm block of a transformer, on (sequence, batch, features): of parallel layers, or of
    torch's without a run.
    """

    def __init__(self, dtype: torch.dtype, *, dropout: float = 0.0, **column: Any) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(FEATURES, dtype=dtype)
        self.norm_feed = nn.LayerNorm(FEATURES, dtype=dtype)
        if is_initialized():
            sections = (FEATURES,) * 3
            self.qkv: nn.Module = ColumnParallelLinear(
                FEATURES, 3 * FEATURES, dtype=dtype, sections=sections, **column
            )
            self.out: nn.Module = RowParallelLinear(FEATURES, FEATURES, dtype=dtype)
            self.up: nn.Module = ColumnParallelLinear(FEATURES, 4 * FEATURES, dtype=dtype, **column)
            self.down: nn.Module = RowParallelLinear(
                4 * FEATURES, FEATURES, bias=False, dtype=dtype
            )
        else:
            self.qkv = nn.Linear(FEATURES, 3 * FEATURES, dtype=dtype)
            self.out = nn.Linear(FEATURES, FEATURES, dtype=dtype)
            self.up = nn.Linear(FEATURES, 4 * FEATURES, dtype=dtype)
            self.down = nn.Linear(4 * FEATURES, FEATURES, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_attention(x)).chunk(3, -1)
        query, key, value = [part.unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for part in parts]
        read = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(read.permute(2, 0, 1, 3).flatten(2))
        y = self.down(nn.functional.gelu(self.up(self.norm_feed(x))))
        if self.dropout:
            with own_random_numbers():
                y = nn.functional.dropout(y, self.dropout)
        out: torch.Tensor = x + y
        return out


class DenseEmbedding(nn.Embedding):
    """``nn.Embedding`` with the projection of :class:`VPEmbedding`."""

    def forward(self, x: torch.Tensor, projection: bool = False) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) if projection else super().forward(x)


class Net(DistributedModule):
    """Ids (sequence / tp, batch) to logits (batch, sequence, vocabulary / tp), with the table of
    the input at the output.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float64, layers: int = 2, wrap: Any = None, **options: Any
    ) -> None:
        super().__init__()
        if is_initialized():
            self.table: nn.Module = VPEmbedding(VOCABULARY, FEATURES, dtype=dtype)
        else:
            self.table = DenseEmbedding(VOCABULARY, FEATURES, dtype=dtype)
        made = [Layer(dtype, **options) for _ in range(layers)]
        self.layers = nn.ModuleList(made if wrap is None else [wrap(layer) for layer in made])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.table(x, projection=True).transpose(0, 1)
        return logits


def fill(model: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    """Values for the whole parameters of ``model``, by name, alike for the dense and the
    parallel one.
    """
    whole = {name: getattr(p, "whole_shape", p.shape) for name, p in model.named_parameters()}
    return {
        name: drawn(*shape, seed=seed + number).mul_(0.5)
        for number, (name, shape) in enumerate(sorted(whole.items()))
    }
