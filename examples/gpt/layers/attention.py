"""``Attention``: every position reads from those that it may see."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import RowParallelLinear


class Attention(bmt.DistributedModule):
    """Multi-head self-attention (Vaswani et al. 2017, §3.2), with one product for queries, keys
    and values.

    Each rank along ``tp`` computes some of the heads, for all positions.
    """

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim_head = dim_head
        width = num_heads * dim_head
        self.project_qkv = bmt.nn.ColumnParallelLinear(
            dim_model, 3 * width, bias=bias, dtype=dtype, sections=[width] * 3
        )
        self.project_out = RowParallelLinear(
            width, dim_model, bias=bias, dtype=dtype, init_gain=output_gain
        )

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Take (length / tp, batch, dim_model) to the same shape.

        ``visible`` (batch, length of queries, length of keys) is True where a query reads a key;
        every query must read at least one. None: a position reads itself and those before it.
        """
        qkv = self.project_qkv(hidden).unflatten(-1, (3, -1, self.dim_head))
        query, key, value = qkv.permute(2, 1, 3, 0, 4)
        mask = visible[:, None] if visible is not None else None
        read = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        output: torch.Tensor = self.project_out(read.permute(2, 0, 1, 3).flatten(2))
        return output
