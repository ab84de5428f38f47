"""Forward and backward of column-parallel and row-parallel linear functions, as plain functions
of tensors.

[Note: what the gradients are] All ranks of the group compute one loss. The gradient of an
activation is distributed like the activation: a rank that holds some rows holds the gradient of
these rows, a rank that holds some features holds the gradient of these features, and a rank that
holds the whole activation holds the whole gradient. So a backward function communicates exactly
where the forward function's output depends on other ranks' input.

[Note: what is saved] Forward saves this rank's rows for backward, not the gathered rows. Backward
gathers them again while it computes the gradient of the input, which does not need them. So saved
activations take 1/W of the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from bmt_params.modules.layer_gradients import GradientWriter
from bmt_tp.overlapped_products import GatheredRows, reduced_product, summed_product
from bmt_tp.row_comparison import check_own_rows, check_same_gradient, check_same_rows
from bmt_tp.tensor_group import tensor_ranks

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of input, weight and bias. None: not wanted, or already written into the tensor that
the Block reduces.
"""


def column_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_input: bool,
    chunks: int | None,
) -> torch.Tensor:
    """Return the product of all rows with this rank's slice of the weight's output features."""
    if not gather_input:
        return linear(input, weight, bias)
    gathered = GatheredRows(_rows(input), chunks)
    output = gathered.times(weight.t(), bias)
    gathered.end()
    return output.view(input.shape[0] * tensor_ranks().size, *input.shape[1:-1], weight.shape[0])


def column_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    gather_input: bool,
    chunks: int | None,
    wanted: tuple[bool, bool, bool],
    compares: bool,
    writer: GradientWriter | None = None,
) -> Gradients:
    """Return the gradients of :func:`column_forward`. The weight gradient is computed while ranks
    sum the input gradient.

    ``compares``: first make sure that ranks have rows as they should.
    """
    for_input, for_weight, for_bias = wanted
    grad, rows = _rows(grad), _rows(input)
    if for_weight and compares:
        (check_own_rows if gather_input else check_same_rows)(rows, "a column-parallel layer")
    gathered = GatheredRows(rows) if gather_input and for_weight else None
    wait: Callable[[], torch.Tensor] | None = None
    if for_input:
        if gather_input:
            wait = summed_product(grad, weight, None, chunks, waits_at_once=not for_weight)
        else:
            wait = reduced_product(grad, weight, None, chunks)
    grad_bias = _bias_gradient(grad, writer) if for_bias else None
    grad_weight = None
    if for_weight:
        whole = rows if gathered is None else gathered.wait()
        grad_weight = _weight_gradient(grad, whole, writer, is_temporary=gathered is not None)
    if gathered is not None:
        gathered.end()
    return None if wait is None else wait().view(input.shape), grad_weight, grad_bias


def row_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scattered: bool,
    chunks: int | None,
) -> torch.Tensor:
    """Return the sum of all ranks' products: this rank's rows of it if ``scattered``, otherwise
    all rows.
    """
    if scattered:
        output = summed_product(_rows(input), weight.t(), bias, chunks, waits_at_once=True)()
    else:
        output = reduced_product(_rows(input), weight.t(), bias, chunks)()
    rows = input.shape[0] // tensor_ranks().size if scattered else input.shape[0]
    return output.view(rows, *input.shape[1:-1], weight.shape[0])


def row_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scattered: bool,
    chunks: int | None,
    wanted: tuple[bool, bool, bool],
    compares: bool,
    writer: GradientWriter | None = None,
) -> Gradients:
    """Return the gradients of :func:`row_forward`. The bias gradient is this rank's share, from its
    part of the rows.

    ``compares``: first make sure that ranks that all have the whole output have the same gradient
    of it.
    """
    for_input, for_weight, for_bias = wanted
    grad, rows = _rows(grad), _rows(input)
    grad_input = grad_bias = gathered = None
    if compares and not scattered:
        check_same_gradient(grad, "a row-parallel layer")
    if scattered:
        gathered = GatheredRows(grad, chunks, needs_all=for_input and for_weight)
    if for_bias:
        grad_bias = _bias_gradient(rows_of_bias(grad, column=False, scattered=scattered), writer)
    if for_input:
        grad_input = grad.mm(weight) if gathered is None else gathered.times(weight)
    grad_weight = None
    if for_weight:
        whole = grad if gathered is None else gathered.wait()
        grad_weight = _weight_gradient(whole, rows, writer, is_temporary=gathered is not None)
    if gathered is not None:
        gathered.end()
    return None if grad_input is None else grad_input.view(input.shape), grad_weight, grad_bias


def rows_of_bias(grad: torch.Tensor, *, column: bool, scattered: bool) -> torch.Tensor:
    """Return the rows whose sum is this rank's bias gradient.

    Every rank has all rows of an all-reduced output, so each takes 1/W of them. In the other cases
    these are all of ``grad``.
    """
    rows = _rows(grad)
    if column or scattered:
        return rows
    ranks = tensor_ranks()
    return rows.tensor_split(ranks.size)[ranks.rank]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a matrix (rows, features)."""
    # Not reshape: torch.compile infers wrong sizes of transposed tensors from it.
    return x.flatten(0, -2)


def _weight_gradient(
    grad: torch.Tensor, input: torch.Tensor, writer: GradientWriter | None, *, is_temporary: bool
) -> torch.Tensor | None:
    return (
        grad.t().mm(input)
        if writer is None
        else writer.weight_gradient(grad, input, is_temporary=is_temporary)
    )


def _bias_gradient(grad: torch.Tensor, writer: GradientWriter | None) -> torch.Tensor | None:
    return grad.sum(0) if writer is None else writer.bias_gradient(grad)
