"""``Attention``: every position reads from those that it may see."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import Linear


class Attention(bmt.DistributedModule):
    """Multi-head self-attention (Vaswani et al. 2017, §3.2), with one product for queries, keys and values."""

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
        self.num_heads = num_heads
        self.project_qkv = Linear(dim_model, 3 * num_heads * dim_head, bias=bias, dtype=dtype)
        self.project_out = Linear(num_heads * dim_head, dim_model, bias=bias, dtype=dtype, init_gain=output_gain)

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Take (batch, length, dim_model) to the same shape.

        ``visible`` (batch, length of queries, length of keys) is True where a query reads a key; every query must read at
        least one. None: a position reads itself and those before it.
        """
        batch, length, _ = hidden.shape
        qkv = self.project_qkv(hidden).view(batch, length, 3, self.num_heads, self.dim_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = visible[:, None] if visible is not None else None
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        output: torch.Tensor = self.project_out(read.transpose(1, 2).flatten(2))
        return output
