"""Linear functions of which each rank of the tensor-parallel group computes a part.

[Note: what the gradients are] All ranks of the group compute one loss. Where they hold rows of an activation, each holds the
gradient of its rows; where they hold features, that of its features; where each holds the whole, each holds the whole
gradient. So a backward function communicates exactly where the forward function's output depends on other ranks' input.

[Note: what is saved] Forward keeps the rank's own rows, not those that it gathered, which are gathered again in backward,
beside the product that needs only the gradient: activations take 1/W of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.modules.layer_gradients import GradientWriter, LayerGradients
from bmt_core.torch_internals import never_compiled
from bmt_tp.feature_exchange import gather_features, own_features, rows_to_features
from bmt_tp.overlapped_products import GatheredRows, product_with_gathered, reduced_product, summed_product
from bmt_tp.tensor_group import tensor_group, tensor_lane


class ReduceType(IntEnum):
    """How the parts of an output, one on each rank, become their sum."""

    ALL_REDUCE = 1
    """Every rank has all rows."""
    REDUCE_SCATTER = 2
    """Each rank has its part of the rows."""


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
        """See :func:`parallel_linear`."""
        return parallel_linear(
            input,
            weight,
            bias,
            gather_input=gather_input,
            gather_output=gather_output,
            split_input=split_input,
            reduce_output_type=reduce_output_type,
            chunks=async_gather_chunks,
        )


@never_compiled
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
) -> torch.Tensor:
    """Return ``input weightᵀ + bias`` of the whole input and weight, of which each rank of the group has a part.

    Rows are dim 0. With W ranks, T rows of the whole, I input and O output features, the weight is cut along its output:

    - by default ``input`` (T, ..., I), alike on all ranks, and ``weight`` (O/W, I) give (T, ..., O/W);
    - with ``gather_input`` each rank brings its rows (T/W, ..., I);
    - with ``gather_output`` every rank gets all features, (T, ..., O);

    or, with ``reduce_output_type``, along its input: ``weight`` (O, I/W), ``bias`` (O,) alike on all ranks,

    - and ``input`` (T, ..., I/W);
    - or, with ``split_input``, the whole input (T, ..., I), alike on all ranks, of which each takes its features;
    - or, with ``split_input`` and ``gather_input``, this rank's rows (T/W, ..., I);
    - ``ALL_REDUCE`` gives (T, ..., O) on every rank, ``REDUCE_SCATTER`` each rank's rows (T/W, ..., O).

    Gradients are those of the whole function: see [Note: what the gradients are]. The bias of a reduced output gets on each
    rank the gradient from 1/W of the rows, so its gradients are to be summed over the group, as those of a
    :class:`DistributedParameter` are that is not local along ``tp``.

    The rows of each rank travel in ``chunks`` pieces beside the products; None: in as many as keep the device busy. Per rank
    receives, in forward, gathering (W - 1)/W * T * I elements, reducing by scatter (W - 1)/W * T * O; in backward, reversed,
    and the gathered input once more. Collective over the group. With one rank it is ``torch.nn.functional.linear``.

    ``gradients`` is what a Block has set on the layer whose weight and bias these are.

    Raises ``ValueError`` for shapes that do not fit, :class:`ConfigError` for options that contradict each other; before
    anything is communicated, on every rank, whose shapes are alike.
    """
    group = tensor_group()
    if group.size == 1:
        return linear(input, weight, bias)
    reduce_type = None if reduce_output_type is None else ReduceType(reduce_output_type)
    _check_options(gather_input, gather_output, split_input, reduce_type, chunks)
    _check_shapes(input, weight, bias, group, split_input)
    input, weight, bias = _as_autocast(input, weight, bias)
    if reduce_type is None:
        output = _with_writer(gradients, _ColumnLinear, input, weight, bias, group, gather_input, chunks)
        return gather_features(output, group) if gather_output else output
    if split_input:
        input = rows_to_features(input, group) if gather_input else own_features(input, group)
    scattered = reduce_type is ReduceType.REDUCE_SCATTER
    if scattered and len(input) % group.size:
        raise ValueError(
            f"The output has {len(input)} rows, which cannot be scattered evenly over {group.size} ranks."
            f" Pad them to {-(-len(input) // group.size) * group.size}, or use ReduceType.ALL_REDUCE."
        )
    return _with_writer(gradients, _RowLinear, input, weight, bias, group, scattered, chunks)


def _with_writer(
    gradients: LayerGradients | None,
    function: type[torch.autograd.Function],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    writer = None if gradients is None else gradients.writer(input, weight, bias)
    if writer is not None:
        writer.begin_forward(input)
    output: torch.Tensor = function.apply(input, weight, bias, writer, *options)  # type: ignore[no-untyped-call]
    if writer is not None:
        writer.end_forward()
    return output


class _ColumnLinear(torch.autograd.Function):
    """The weight's output features are spread over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        writer: GradientWriter | None,
        group: Group,
        gather_input: bool,
        chunks: int | None,
    ) -> torch.Tensor:
        _save(ctx, input, weight, writer)
        ctx.group, ctx.gather_input, ctx.chunks = group, gather_input, chunks
        if not gather_input:
            return linear(input, weight, bias).detach()
        output = product_with_gathered(_rows(input), weight, bias, group, tensor_lane(), chunks)
        return output.view(group.size * len(input), *input.shape[1:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight = _saved(ctx)
        grad, rows, lane = _rows(grads[0]), _rows(input), tensor_lane()
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        gathered = GatheredRows(rows, ctx.group, lane) if ctx.gather_input and for_weight else None
        wait: Callable[[], torch.Tensor] | None = None
        if for_input and ctx.gather_input:
            wait = summed_product(grad, weight.t(), ctx.group, lane, ctx.chunks).wait
        elif for_input:
            wait = reduced_product(grad, weight.t(), ctx.group, lane, ctx.chunks)
        of_bias = _bias_gradient(ctx, grad) if for_bias else None
        of_weight = _weight_gradient(ctx, grad, rows if gathered is None else gathered.wait()) if for_weight else None
        of_input = wait().view(input.shape) if wait is not None else None
        return of_input, of_weight, of_bias, None, None, None, None


class _RowLinear(torch.autograd.Function):
    """The weight's input features are spread over the ranks, and so are the input's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        writer: GradientWriter | None,
        group: Group,
        scattered: bool,
        chunks: int | None,
    ) -> torch.Tensor:
        _save(ctx, input, weight, writer)
        ctx.group, ctx.scattered, ctx.chunks = group, scattered, chunks
        if scattered:
            output = summed_product(_rows(input), weight, group, tensor_lane(), chunks).wait()
        else:
            output = reduced_product(_rows(input), weight, group, tensor_lane(), chunks)()
        if bias is not None:
            output += bias
        return output.view(-1, *input.shape[1:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight = _saved(ctx)
        grad, rows, group = _rows(grads[0]), _rows(input), ctx.group
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        of_bias = None
        if for_bias:
            of_bias = _bias_gradient(ctx, grad if ctx.scattered else grad.tensor_split(group.size)[group.rank])
        of_input = None
        if ctx.scattered:
            gathered = GatheredRows(grad, group, tensor_lane(), ctx.chunks)
            of_input = gathered.times(weight.t()) if for_input else None
            grad = gathered.wait()
        elif for_input:
            of_input = grad.mm(weight)
        of_weight = _weight_gradient(ctx, grad, rows) if for_weight else None
        of_input = None if of_input is None else of_input.view(input.shape)
        return of_input, of_weight, of_bias, None, None, None, None


def _save(ctx: Any, input: torch.Tensor, weight: torch.Tensor, writer: GradientWriter | None) -> None:
    ctx.writer = writer
    if writer is None:
        ctx.save_for_backward(input, weight)
    else:
        ctx.save_for_backward(input)
        ctx.weight = weight


def _saved(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the weight, with its values there."""
    if ctx.writer is not None:
        ctx.writer.begin_backward()  # backward may not have come through the block's outputs
    input, *weight = ctx.saved_tensors
    return input, weight[0] if weight else ctx.weight


def _weight_gradient(ctx: Any, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor | None:
    gradient: torch.Tensor | None = (
        grad.t().mm(input) if ctx.writer is None else ctx.writer.weight_gradient(grad, input)
    )
    return gradient


def _bias_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    gradient: torch.Tensor | None = grad.sum(0) if ctx.writer is None else ctx.writer.bias_gradient(grad)
    return gradient


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with one row for each vector of features."""
    return x.reshape(-1, x.shape[-1])


def _as_autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return them in the dtype in which autocast computes products, if it is on."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_options(
    gather_input: bool, gather_output: bool, split_input: bool, reduce_type: ReduceType | None, chunks: int | None
) -> None:
    if chunks is not None and chunks < 1:
        raise ConfigError(f"The number of chunks must be at least 1, or None to let bmt choose, not {chunks}.")
    if reduce_type is None and split_input:
        raise ConfigError(
            "split_input needs reduce_output_type: each rank's product of its features is a part of a sum."
        )
    if reduce_type is not None and gather_output:
        raise ConfigError("gather_output and reduce_output_type exclude each other: a reduced output has all features.")
    if reduce_type is not None and gather_input and not split_input:
        raise ConfigError("gather_input with reduce_output_type needs split_input: gathered rows have all features.")


def _check_shapes(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    split_input: bool,
) -> None:
    expected = weight.shape[1] * (group.size if split_input else 1)
    if input.dim() < 2 or input.shape[-1] != expected:
        raise ValueError(
            f"Expected an input (rows, ..., {expected}) for this rank's weight of shape {tuple(weight.shape)},"
            f" with tp_size={group.size}, not one of shape {tuple(input.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"Expected a bias of shape ({weight.shape[0]},), not {tuple(bias.shape)}.")
