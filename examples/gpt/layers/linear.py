"""``Linear``: a matrix product and a bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Linear(bmt.DistributedModule):
    """``y = x Wᵀ + b``, with W from Xavier's normal distribution times ``init_gain`` and b zero at the start."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        init_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.xavier_normal_, gain=init_gain),
        )
        self.bias: bmt.DistributedParameter | None = None
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(out_features, dtype=dtype),
                init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight, self.bias)
