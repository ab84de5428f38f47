"""The parallel linear functions as custom operators of torch, for ``torch.compile``.

The compiler cannot trace streams and communication. It treats an operator as one opaque call whose
output shape is known, and compiles the code around the call as one graph. The operators are
registered by their schemas, because the wrapper of ``torch.library.custom_op`` would cost the host
more time per call than the operator itself.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_params.modules.layer_gradients import running_backward
from bmt_tp.linear_products import (
    column_backward,
    column_forward,
    row_backward,
    row_forward,
    rows_of_bias,
)
from bmt_tp.row_comparison import is_time_to_compare
from bmt_tp.tensor_group import tensor_ranks

_library = torch.library.Library("bmt_tp", "DEF")  # type: ignore[no-untyped-call]
_FORWARD = "(Tensor input, Tensor weight, Tensor? bias, bool option, int? chunks) -> Tensor"
_BACKWARD = (
    "(Tensor grad, Tensor input, Tensor weight, bool option, int? chunks, bool for_input, bool"
    " for_weight, bool may_compare)"
    " -> (Tensor, Tensor)"
)


class CompiledLinear(torch.autograd.Function):
    """:func:`column_forward` with ``option`` as ``gather_input``, or without ``column``
    :func:`row_forward` with ``scattered``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        column: bool,
        option: bool,
        chunks: int | None,
        may_compare: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.may_compare = may_compare
        ctx.column, ctx.option, ctx.chunks, ctx.has_bias = column, option, chunks, bias is not None
        operators = torch.ops.bmt_tp
        operator = operators.column_forward if column else operators.row_forward
        output: torch.Tensor = operator(input, weight, bias, option, chunks)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight = ctx.saved_tensors
        operators = torch.ops.bmt_tp
        operator = operators.column_backward if ctx.column else operators.row_backward
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        wanted = for_input, for_weight, ctx.may_compare
        grad_input, grad_weight = operator(grads[0], input, weight, ctx.option, ctx.chunks, *wanted)
        grad_bias = None
        # Outside the operator: it needs no communication, so the compiler can fuse it.
        if for_bias and ctx.has_bias:
            grad_bias = rows_of_bias(grads[0], column=ctx.column, scattered=ctx.option).sum(0)
        return (
            grad_input if for_input else None,
            grad_weight if for_weight else None,
            grad_bias,
            None,
            None,
            None,
            None,
        )


def _register() -> None:
    library: Any = _library  # torch does not annotate its methods
    for kind, forward, backward in (
        ("column", column_forward, column_backward),
        ("row", row_forward, row_backward),
    ):
        library.define(f"{kind}_forward{_FORWARD}", tags=[torch.Tag.needs_fixed_stride_order])
        library.define(f"{kind}_backward{_BACKWARD}", tags=[torch.Tag.needs_fixed_stride_order])
        library.impl(f"{kind}_forward", forward, "CompositeExplicitAutograd")
        library.impl(f"{kind}_backward", _complete(backward), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"bmt_tp::{kind}_forward", _fake_forward(kind == "column"), lib=library
        )
        torch.library.register_fake(f"bmt_tp::{kind}_backward", _fake_backward, lib=library)


class _PlacedGradients:
    """A :class:`GradientWriter` that writes the gradient of ``weight`` into the buffer from which
    the running Block reduces it.

    Without a running Block the gradient is a new tensor. The operators do not compute the gradient
    of the bias.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def begin_forward(self, input: torch.Tensor) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self) -> None: ...

    def weight_gradient(
        self, grad: torch.Tensor, input: torch.Tensor, *, is_temporary: bool = False
    ) -> torch.Tensor:
        buffers = running_backward.buffers
        reserved = None if buffers is None else buffers.reserve_gradient(self._weight)
        return grad.t().mm(input) if reserved is None else torch.mm(grad.t(), input, out=reserved)

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sum(0)


def _complete(backward: Any) -> Any:
    """Return ``backward`` in the form of an operator: without the bias, and with tensors in place
    of None.

    A gradient that is not wanted, or that was written where the Block reduces it, is an
    empty tensor.
    """

    def complete(
        grad: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        option: bool,
        chunks: int | None,
        for_input: bool,
        for_weight: bool,
        may_compare: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compares = may_compare and is_time_to_compare(None)  # no layer counts its calls here
        wanted = for_input, for_weight, False
        writer = _PlacedGradients(weight)
        grad_input, grad_weight, _ = backward(
            grad, input, weight, option, chunks, wanted, compares, writer
        )
        return (
            grad.new_empty(0) if grad_input is None else grad_input,
            grad.new_empty(0) if grad_weight is None else grad_weight,
        )

    return complete


def _fake_forward(column: bool) -> Any:
    def shaped(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        option: bool,
        chunks: int | None,
    ) -> torch.Tensor:
        rows, size = input.shape[0], tensor_ranks().size if option else 1
        return input.new_empty(
            (rows * size if column else rows // size, *input.shape[1:-1], weight.shape[0])
        )

    return shaped


def _fake_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    option: bool,
    chunks: int | None,
    for_input: bool,
    for_weight: bool,
    may_compare: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape if for_input else (0,)), input.new_empty(
        weight.shape if for_weight else (0,)
    )


_register()
