"""``LayerNorm``: mean 0 and variance 1 over the last dim, then a learned scale and shift."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class LayerNorm(bmt.DistributedModule):
    """Layer normalisation (Ba et al. 2016) over the last dim."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.normalized_shape = (normalized_shape,)
        self.weight = bmt.DistributedParameter(
            torch.empty(normalized_shape, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.ones_),
        )
        self.bias: bmt.DistributedParameter | None = None
        if bias:
            self.bias = bmt.DistributedParameter(
                torch.empty(normalized_shape, dtype=dtype),
                init_method=bmt.ParameterInitializer(torch.nn.init.zeros_),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (..., normalized_shape)."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
