"""The GPT of ``models.py`` for tensor parallelism: rows are (sequence, batch, hidden), and heads
lie whole in the fused projection.

[Note: heads in the fused projection]
The weight of ``qkv`` in ``models.py`` is all queries, then all keys, then all values. Cut in equal
parts, it would give no rank whole heads. So its rows are put in another order: for each head its
query, key and value. The function stays the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from bench.models import Embeddings, Size, TransformerBlock


class SequenceFirstBlock(TransformerBlock):
    """The same block on (sequence, batch, hidden), of as many heads as its ``qkv`` has."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__(size, dtype)
        self.head_dim = size.dim_model // size.num_heads

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        split = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = split.permute(3, 1, 2, 0, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.attention_out(mixed.permute(2, 0, 1, 3).flatten(2))
        return attended


class SequenceFirstEmbeddings(Embeddings):
    """Token and position embeddings, as rows of this rank where their tables are parallel."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, length) to (length, batch, dim_model), or to this rank's part of
        the length.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.token(tokens.t()) + self.position(positions).unsqueeze(1)
        return hidden


def sequence_first(unit: nn.Module, size: Size) -> nn.Module:
    """Return ``unit`` of ``models.py`` as one that computes the same on (sequence,
    batch, hidden).
    """
    kinds = {TransformerBlock: SequenceFirstBlock, Embeddings: SequenceFirstEmbeddings}
    if type(unit) not in kinds:
        return unit
    with torch.device("meta"):
        made = kinds[type(unit)](size, next(unit.parameters()).dtype)
    made.load_state_dict(sequence_first_values(unit, size), assign=True)
    return made


def sequence_first_values(unit: nn.Module, size: Size) -> dict[str, torch.Tensor]:
    """Return the values of ``unit`` for its sequence-first counterpart: see
    [Note: heads in the fused projection].
    """
    values: dict[str, torch.Tensor] = unit.state_dict()
    for name in [name for name in values if name.startswith("qkv.")]:
        by_kind = values[name].view(
            3, size.num_heads, size.dim_model // size.num_heads, *values[name].shape[1:]
        )
        values[name] = by_kind.transpose(0, 1).flatten(0, 2)
    return values


def tensor_ranks() -> list[int]:
    """Return the ranks that share this rank's data: its tensor-parallel group."""
    topology = bmt.current().topology
    size = topology.axis_size("tp")
    first = topology.rank // size * size
    return list(range(first, first + size))
