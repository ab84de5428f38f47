"""``FeedForward``: the part of a transformer block that treats every position by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt

from .linear import Linear


class FeedForward(bmt.DistributedModule):
    """``W_out gelu(W_in x)``, with the tanh form of GELU."""

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
        self.w_in = Linear(dim_model, dim_ff, bias=bias, dtype=dtype)
        self.w_out = Linear(dim_ff, dim_model, bias=bias, dtype=dtype, init_gain=output_gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (..., dim_model) to (..., dim_model)."""
        output: torch.Tensor = self.w_out(F.gelu(self.w_in(x), approximate="tanh"))
        return output
