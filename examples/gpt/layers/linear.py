"""``RowParallelLinear``: the layer of bmt-tp, with a gain of its initial weights."""

from __future__ import annotations

import torch

import bmtrain as bmt


class RowParallelLinear(bmt.nn.RowParallelLinear):
    """``y = x Wᵀ + b``, with W from Xavier's normal distribution times ``init_gain`` and b zero at
    the start.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        init_gain: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        # The parameter itself: self.weight gathers a copy of the whole.
        weight = self._parameters["weight"]
        assert isinstance(weight, bmt.DistributedParameter)
        weight._init_method = bmt.ParameterInitializer(torch.nn.init.xavier_normal_, gain=init_gain)
