"""``ColumnParallelLinear`` and ``RowParallelLinear``: linear layers whose weight is split over the
ranks along ``tp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.errors import ConfigError
from bmt_params import DistributedModule, DistributedParameter, Locality, ParameterInitializer
from bmt_params.guards.same_data import Occasions
from bmt_params.modules.layer_gradients import LayerGradients
from bmt_tp.linear_function import ReduceType, parallel_linear
from bmt_tp.tensor_group import AXIS, own_share, tensor_ranks


class ColumnParallelLinear(DistributedModule):
    """``y = x Wᵀ + b``, split by output features: each rank along ``tp`` computes out_features / tp
    of them.

    ``weight`` is (out_features / tp, in_features) on each rank. With ``gather_input`` the input is
    this rank's rows (rows / tp, ..., in_features), and the rows of the other ranks arrive in up to
    ``async_gather_chunks`` pieces while the product is computed. Without ``gather_input`` all tp
    ranks pass the same rows. The output is (rows, ..., out_features / tp), or all output features
    on every rank with ``gather_output``.

    ``sections`` are the sizes of consecutive parts of the output, each split over the ranks
    separately. For queries, keys and values of H features in one matrix, (H, H, H) gives each rank
    the queries, keys and values of the same heads.

    Rows are dim 0, or dim 1 after ``init_distributed(sequence_dim=1)``.

    ``init_parameters`` draws from Xavier's normal distribution for the whole matrix. Communication
    and gradients: see :func:`parallel_linear`. Raises :class:`ConfigError` for sizes that tp does
    not divide.
    """

    layer_gradients: LayerGradients | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int | None = 2,
        *,
        sections: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._occasions = Occasions()
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.gather_input = gather_input
        self.async_gather_chunks = async_gather_chunks
        self.sections = tuple(sections)
        if self.sections and sum(self.sections) != out_features:
            raise ConfigError(
                f"sections {self.sections} do not add up to out_features={out_features}: their sum"
                f" is {sum(self.sections)}. Give the size of every part of the output."
            )
        if min(self.sections, default=1) < 1:
            raise ConfigError(
                f"sections {self.sections} must be sizes of at least 1. Leave empty sections out."
            )
        own = sum(
            [
                own_share(section, f"A section of {out_features} output features")
                for section in self.sections
            ]
        )
        own = own or own_share(out_features, "out_features")
        locality = Locality(AXIS, split_dim=0, sections=self.sections)
        # On the meta device: it has no values, and is refused until something initialises it.
        self.weight = DistributedParameter(
            torch.empty(own, in_features, dtype=dtype, device="meta"),
            init_method=ParameterInitializer(torch.nn.init.xavier_normal_),
            locality=[locality],
        )
        self.bias: DistributedParameter | None = None
        if bias:
            self.bias = DistributedParameter(
                torch.empty(own, dtype=dtype, device="meta"),
                init_method=ParameterInitializer(torch.nn.init.zeros_),
                locality=[locality],
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return all rows with this rank's output features, or with all of them if
        ``gather_output``. Collective over tp.
        """
        return parallel_linear(
            input,
            self.weight,
            self.bias,
            gather_input=self.gather_input,
            gather_output=self.gather_output,
            sections=self.sections,
            chunks=self.async_gather_chunks,
            gradients=self.layer_gradients,
            occasions=self._occasions,
            sequence_dim=tensor_ranks().sequence_dim,
        )

    def extra_repr(self) -> str:
        """Say the sizes in ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, gather_input={self.gather_input},"
            f" gather_output={self.gather_output}"
        )


class RowParallelLinear(DistributedModule):
    """``y = x Wᵀ + b``, split by input features: each rank along ``tp`` has in_features / tp
    of them.

    ``weight`` is (out_features, in_features / tp) on each rank. The input is all rows with this
    rank's features, (rows, ..., in_features / tp), which is the output of a
    :class:`ColumnParallelLinear`. With ``split_input`` the input is this rank's rows with all
    features, (rows / tp, ..., in_features). The output is this rank's rows (rows / tp, ...,
    out_features), or with ``all_reduce_output`` all rows on every rank. The product is computed in
    up to ``async_chunks`` pieces: one is summed over the ranks while the next is computed.

    All ranks have the same ``bias`` (out_features,). Each rank computes its gradient from its part
    of the rows, and the engine sums these gradients. Initial values, communication and errors: see
    :class:`ColumnParallelLinear`.
    """

    layer_gradients: LayerGradients | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int | None = 2,
    ) -> None:
        super().__init__()
        self._occasions = Occasions()
        self.in_features = in_features
        self.out_features = out_features
        self.split_input = split_input
        self.all_reduce_output = all_reduce_output
        self.async_chunks = async_chunks
        # On the meta device: it has no values, and is refused until something initialises it.
        self.weight = DistributedParameter(
            torch.empty(
                out_features, own_share(in_features, "in_features"), dtype=dtype, device="meta"
            ),
            init_method=ParameterInitializer(torch.nn.init.xavier_normal_),
            locality=[Locality(AXIS, split_dim=1)],
        )
        self.bias: DistributedParameter | None = None
        if bias:
            self.bias = DistributedParameter(
                torch.empty(out_features, dtype=dtype, device="meta"),
                init_method=ParameterInitializer(torch.nn.init.zeros_),
                locality=[Locality(AXIS, gradients="share")],
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over the ranks, or all rows if ``all_reduce_output``.
        Collective over tp.
        """
        return parallel_linear(
            input,
            self.weight,
            self.bias,
            gather_input=self.split_input,
            split_input=self.split_input,
            reduce_output_type=ReduceType.ALL_REDUCE
            if self.all_reduce_output
            else ReduceType.REDUCE_SCATTER,
            chunks=self.async_chunks,
            gradients=self.layer_gradients,
            occasions=self._occasions,
            sequence_dim=tensor_ranks().sequence_dim,
        )

    def extra_repr(self) -> str:
        """Say the sizes in ``repr``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, split_input={self.split_input},"
            f" all_reduce_output={self.all_reduce_output}"
        )
