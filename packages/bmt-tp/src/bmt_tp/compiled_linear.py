"""The parallel linear functions as operators of torch, for code that is compiled.

The compiler cannot look into streams and communication. An operator is one call to it, of which it knows the shape of the output
and the derivative, so that it compiles what is around it in one piece.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_tp.linear_products import Gradients, column_backward, column_forward, row_backward, row_forward
from bmt_tp.tensor_group import tensor_size


@torch.library.custom_op("bmt_tp::column_linear", mutates_args=())
def column_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gather_input: bool, chunks: int | None
) -> torch.Tensor:
    """See :func:`column_forward`."""
    return column_forward(input, weight, bias, gather_input, chunks)


@torch.library.custom_op("bmt_tp::column_linear_backward", mutates_args=())
def column_linear_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    gather_input: bool,
    chunks: int | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`column_backward`; empty in the place of what is not wanted."""
    found = column_backward(grad, input, weight, gather_input, chunks, (for_input, for_weight, for_bias))
    return _filled(found, grad)


@torch.library.custom_op("bmt_tp::row_linear", mutates_args=())
def row_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scattered: bool, chunks: int | None
) -> torch.Tensor:
    """See :func:`row_forward`."""
    return row_forward(input, weight, bias, scattered, chunks)


@torch.library.custom_op("bmt_tp::row_linear_backward", mutates_args=())
def row_linear_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scattered: bool,
    chunks: int | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`row_backward`; empty in the place of what is not wanted."""
    found = row_backward(grad, input, weight, scattered, chunks, (for_input, for_weight, for_bias))
    return _filled(found, grad)


@column_linear.register_fake
def _(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gather_input: bool, chunks: int | None
) -> torch.Tensor:
    rows = input.shape[0] * (tensor_size() if gather_input else 1)
    return input.new_empty((rows, *input.shape[1:-1], weight.shape[0]))


@row_linear.register_fake
def _(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scattered: bool, chunks: int | None
) -> torch.Tensor:
    rows = input.shape[0] // (tensor_size() if scattered else 1)
    return input.new_empty((rows, *input.shape[1:-1], weight.shape[0]))


@row_linear_backward.register_fake
@column_linear_backward.register_fake
def _fake_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    option: bool,
    chunks: int | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (input.shape, for_input), (weight.shape, for_weight), (weight.shape[:1], for_bias)
    of_input, of_weight, of_bias = [input.new_empty(shape if wanted else (0,)) for shape, wanted in shapes]
    return of_input, of_weight, of_bias


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    input, weight, _, ctx.option, ctx.chunks = inputs
    ctx.save_for_backward(input, weight)


def _differentiate(operator: Any, backward: Any) -> None:
    def differentiated(ctx: Any, grad: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[:3]
        found = backward(grad, *ctx.saved_tensors, ctx.option, ctx.chunks, *wanted)
        return *[value if want else None for value, want in zip(found, wanted, strict=True)], None, None

    operator.register_autograd(differentiated, setup_context=_save)


_differentiate(column_linear, column_linear_backward)
_differentiate(row_linear, row_linear_backward)


def _filled(found: Gradients, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_input, of_weight, of_bias = [like.new_empty(0) if value is None else value for value in found]
    return of_input, of_weight, of_bias
