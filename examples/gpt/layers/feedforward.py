"""``FeedForward``: the part of a transformer block that treats every position by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import RowParallelLinear


class FeedForward(bmt.DistributedModule):
    """``W_out gelu(W_in x)``, with the tanh form of GELU. Each rank along ``tp`` computes some of
    the dim_ff features.
    """

    def __init__(
        self,
        dim_model: int,
        dim_ff: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.w_in = bmt.nn.ColumnParallelLinear(dim_model, dim_ff, bias=bias, dtype=dtype)
        self.w_out = RowParallelLinear(
            dim_ff, dim_model, bias=bias, dtype=dtype, init_gain=output_gain
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (length / tp, batch, dim_model) to the same shape."""
        output: torch.Tensor = self.w_out(F.gelu(self.w_in(x), approximate="tanh"))
        return output
