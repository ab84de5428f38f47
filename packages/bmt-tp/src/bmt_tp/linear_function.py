"""Linear functions whose weight is split over the ranks of the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.nn.functional import linear

from bmt_core.errors import ConfigError
from bmt_params.guards.first_derivatives import first_derivatives_only
from bmt_params.guards.same_data import Occasions
from bmt_params.modules.layer_gradients import GradientWriter, LayerGradients
from bmt_tp.compiled_linear import CompiledLinear
from bmt_tp.feature_exchange import gather_features, own_features, rows_to_features
from bmt_tp.linear_products import column_backward, column_forward, row_backward, row_forward
from bmt_tp.row_comparison import check_own_rows, check_same_shape, is_time_to_compare
from bmt_tp.tensor_group import tensor_ranks


class ReduceType(IntEnum):
    """How the partial outputs of the ranks are summed."""

    ALL_REDUCE = 1
    """Every rank gets all rows of the sum."""
    REDUCE_SCATTER = 2
    """Each rank gets its part of the rows."""


class OpParallelLinear:
    """BMTrain's name of :func:`parallel_linear`."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | int | None = None,
        async_gather_chunks: int | None = 2,
    ) -> torch.Tensor:
        return parallel_linear(
            input,
            weight,
            bias,
            gather_input=gather_input,
            gather_output=gather_output,
            split_input=split_input,
            reduce_output_type=reduce_output_type,
            chunks=async_gather_chunks,
            sequence_dim=tensor_ranks().sequence_dim,
        )


def parallel_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gather_input: bool = False,
    gather_output: bool = False,
    split_input: bool = False,
    reduce_output_type: ReduceType | int | None = None,
    chunks: int | None = None,
    gradients: LayerGradients | None = None,
    sections: Sequence[int] = (),
    occasions: Occasions | None = None,
    compares: bool = True,
    sequence_dim: int = 0,
) -> torch.Tensor:
    """Return ``input weightᵀ + bias``, where each rank of the group has a slice of the weight.

    Rows are dim 0. There are W ranks, T rows in all, I input features and O output features. By
    default the weight is split by its output features: ``weight`` is (O/W, I) and ``bias`` (O/W,).

    - By default all ranks pass the same ``input`` (T, ..., I), and each gets (T, ..., O/W).
    - With ``gather_input`` each rank passes its rows (T/W, ..., I).
    - With ``gather_output`` every rank gets all features, (T, ..., O); ``sections`` says how they
      are split, see :class:`Locality`.

    With ``reduce_output_type`` the weight is split by its input features: ``weight`` is (O, I/W),
    and ``bias`` (O,) is the same on all ranks.

    - By default ``input`` is (T, ..., I/W).
    - With ``split_input`` all ranks pass the same input (T, ..., I), and each uses its slice of
      the features.
    - With ``split_input`` and ``gather_input`` each rank passes its rows (T/W, ..., I).
    - ``ALL_REDUCE`` gives (T, ..., O) on every rank, ``REDUCE_SCATTER`` gives each rank its rows
      (T/W, ..., O).

    Gradients are those of the whole function: see [Note: what the gradients are] in
    linear_products.py. For the bias of a reduced output, each rank computes a share of the gradient
    from 1/W of the rows. The gradient is the sum of these shares over the group, which is formed
    with the other reductions for a :class:`DistributedParameter` that is not local along ``tp``.

    Rows are transferred while products are computed, in up to ``chunks`` pieces per rank, each
    large enough to keep a GPU busy; with None bmt chooses their number. In forward each rank
    receives (W - 1)/W * T * I elements if rows are gathered, and (W - 1)/W * T * O if the output is
    scattered. Backward sends the gradients in the opposite direction and gathers the input again.
    Collective over the group. With one rank it is ``torch.nn.functional.linear``.

    What backward communicates depends on whether the input and the weight require gradients, so
    this must be the same on all ranks of the group.

    With ``sequence_dim=1`` the rows lie along dim 1 of ``input`` and of the output, which have at
    least three dims: (batch, sequence / W, features).

    ``gradients`` is the ``layer_gradients`` that a Block has set on the layer of this weight and
    bias. ``occasions`` is the layer's count of :func:`bmt_tp.row_comparison.is_time_to_compare`.
    ``compares`` is False for layers of a plan, which cuts the rows itself: rows of ranks may
    rightly be equal then.

    Raises ``ValueError`` for shapes or dtypes that do not fit and :class:`ConfigError` for options
    that contradict each other. Both are the same on all ranks, so all ranks raise, before anything
    is communicated. Shapes that differ between ranks are found as occasions come.
    """
    ranks = tensor_ranks()
    if ranks.size == 1:
        return linear(input, weight, bias)
    _check_options(gather_input, gather_output, split_input, reduce_output_type, chunks)
    _check_shapes(input, weight, bias, ranks.size, split_input)
    input, weight, bias = _as_autocast(input, weight, bias)
    _check_dtypes(input, weight, bias)
    scattered = reduce_output_type == ReduceType.REDUCE_SCATTER
    # In compiled code it is decided when that runs: None.
    is_time = (
        compares
        and torch.is_grad_enabled()
        and (None if is_compiling() else is_time_to_compare(occasions))
    )
    if is_time and (gather_input or scattered):
        check_same_shape(input)
    rows_are_dim_1 = sequence_dim == 1 and (gather_input or scattered)
    if rows_are_dim_1:
        input = sequence_first(input)
    if reduce_output_type is None:
        output = _applied(True, input, weight, bias, gather_input, chunks, gradients, is_time)
        if gather_output:
            output = gather_features(output, ranks.group, sections, compares=is_time)
    else:
        if split_input:
            if gather_input and is_time:
                check_own_rows(input, "a row-parallel layer")
            of_rank = rows_to_features if gather_input else own_features
            input = of_rank(input, ranks.group)
        if scattered:
            _check_scattered(len(input), ranks.size)
        output = _applied(False, input, weight, bias, scattered, chunks, gradients, is_time)
    return output.transpose(0, 1) if rows_are_dim_1 else output


def sequence_first(x: torch.Tensor, least_dims: int = 3) -> torch.Tensor:
    """Return ``x`` (batch, sequence / W, ...) with the sequence as dim 0; ``ValueError`` if it has
    fewer dims.
    """
    if x.dim() < least_dims:
        raise ValueError(
            "With sequence_dim=1 tensor-parallel layers expect (batch, sequence / tp, ...) with at"
            f" least {least_dims} dims, not {tuple(x.shape)}. Keep batch and sequence apart, or"
            " start with sequence_dim=0, where rows are dim 0."
        )
    return x.transpose(0, 1)


def _applied(
    column: bool,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    option: bool,
    chunks: int | None,
    gradients: LayerGradients | None,
    compares: bool | None,
) -> torch.Tensor:
    if is_compiling():
        arguments = input, weight, bias, column, option, chunks, compares is None
        compiled: torch.Tensor = CompiledLinear.apply(*arguments)  # type: ignore[no-untyped-call]
        return compiled
    writer = None if gradients is None else gradients.writer(input, weight, bias)
    if writer is not None:
        writer.begin_forward(input)
    call = _Call(column, option, chunks, writer, bool(compares))
    output: torch.Tensor = _ParallelLinear.apply(input, weight, bias, call)  # type: ignore[no-untyped-call]
    if writer is not None:
        writer.end_forward()
    return output


class _Call(NamedTuple):
    """The arguments of :class:`_ParallelLinear` that are not tensors.

    With ``column`` the weight is split by its output features, and ``option`` is ``gather_input``;
    otherwise it is split by its input features, and ``option`` says whether the output is
    scattered. ``compares``: backward compares what ranks have.
    """

    column: bool
    option: bool
    chunks: int | None
    writer: GradientWriter | None
    compares: bool


class _ParallelLinear(torch.autograd.Function):
    """(input, weight, bias, call) -> output. ``call`` is one object, because ``apply`` spends time
    on each argument.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        ctx.call = call
        if call.writer is None:
            ctx.save_for_backward(input, weight)
        else:  # the writer's Block gathers the weight again before backward reads it
            ctx.save_for_backward(input)
            ctx.weight = weight
        # Detached: a product of more than two dimensions is a view, and later code may modify it
        # in place.
        forward = column_forward if call.column else row_forward
        return forward(input, weight, bias, call.option, call.chunks).detach()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        call = ctx.call
        if call.writer is not None:
            # Backward may have reached this layer without passing the block's outputs.
            call.writer.begin_backward()
        input, *weight = ctx.saved_tensors
        arguments = (
            grads[0],
            input,
            weight[0] if weight else ctx.weight,
            call.option,
            call.chunks,
            ctx.needs_input_grad[:3],
            call.compares,
            call.writer,
        )
        return *(column_backward if call.column else row_backward)(*arguments), None


def _as_autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the operands in autocast's dtype, if autocast is on. As in torch, float64 is
    not cast.
    """
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(input), cast(weight), None if bias is None else cast(bias)


def _check_options(
    gather_input: bool,
    gather_output: bool,
    split_input: bool,
    reduce_type: ReduceType | int | None,
    chunks: int | None,
) -> None:
    if chunks is not None and chunks < 1:
        raise ConfigError(
            f"The number of chunks must be at least 1, or None to let bmt choose, not {chunks}."
        )
    if reduce_type not in (None, ReduceType.ALL_REDUCE, ReduceType.REDUCE_SCATTER):
        raise ConfigError(f"reduce_output_type must be a ReduceType or None, not {reduce_type!r}.")
    if reduce_type is None and split_input:
        raise ConfigError(
            "split_input needs reduce_output_type, because each rank's product is one term of a"
            " sum. Pass ReduceType.ALL_REDUCE or ReduceType.REDUCE_SCATTER."
        )
    if reduce_type is not None and gather_output:
        raise ConfigError(
            "gather_output and reduce_output_type exclude each other: a reduced output has all"
            " features. Leave gather_output out."
        )
    if reduce_type is not None and gather_input and not split_input:
        raise ConfigError(
            "gather_input with reduce_output_type needs split_input, because gathered rows have all"
            " features. Set split_input=True, or leave gather_input out."
        )


def _check_shapes(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: int,
    split_input: bool,
) -> None:
    expected = weight.shape[1] * (size if split_input else 1)
    if input.dim() < 2 or input.shape[-1] != expected:
        raise ValueError(
            f"Expected an input (rows, ..., {expected}) for this rank's weight of shape"
            f" {tuple(weight.shape)}, with tp_size={size}, not one of shape {tuple(input.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"Expected a bias of shape ({weight.shape[0]},) for this rank's weight of shape"
            f" {tuple(weight.shape)}, not {tuple(bias.shape)}."
        )


def _check_scattered(rows: int, size: int) -> None:
    if rows % size:
        raise ValueError(
            f"The output has {rows} rows, which cannot be scattered evenly over {size} ranks. Pad"
            f" them to {-(-rows // size) * size}, or use ReduceType.ALL_REDUCE."
        )


def _check_dtypes(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ``ValueError`` for unequal dtypes, before rows are sent: the product itself would raise
    too late.
    """
    found = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    if len(found) > 1:
        of_bias = "" if bias is None else f" and bias {bias.dtype}"
        raise ValueError(
            f"Input, weight and bias must have one dtype; the input has {input.dtype}, the weight"
            f" {weight.dtype}{of_bias}. Convert the input with .to(dtype), or use torch.autocast."
        )
