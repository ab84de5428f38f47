"""``Linear``: ``torch.nn.Linear`` with distributed parameters."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from bmt_params.init.parameter_init import ParameterInitializer
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter


class Linear(DistributedModule):
    """``y = x Wᵀ + b`` on (..., in_features). ``weight`` (out_features, in_features) and ``bias``
    are sharded.

    ``init_parameters`` draws the weight from Xavier's normal distribution (Glorot and Bengio 2010,
    §4.2.1) and clears the bias. ``dtype`` is that of the parameters, by default torch's default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        # On the meta device: it has no values, and is refused until something initialises it.
        self.weight = DistributedParameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"),
            init_method=ParameterInitializer(torch.nn.init.xavier_normal_),
        )
        self.bias: DistributedParameter | None = None
        if bias:
            self.bias = DistributedParameter(
                torch.empty(out_features, dtype=dtype, device="meta"),
                init_method=ParameterInitializer(torch.nn.init.zeros_),
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Take (..., in_features) to (..., out_features)."""
        return OpLinear.apply(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the sizes in ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}"
        )


class OpLinear:
    """BMTrain's name of the function ``torch.nn.functional.linear``."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``input weightᵀ + bias``: (..., in) and (out, in) to (..., out)."""
        return linear(input, weight, bias)
