"""Differentiable collectives over a :class:`Group`.

[Note: what is differentiated] Every rank has its own loss. As in BMTrain, a backward pass computes
the derivative of *this rank's* loss with respect to this rank's input: a collective's backward does
not sum gradients over ranks. The exceptions are ``broadcast`` and ``reduce_scatter``, whose results
depend on inputs that only other ranks have, and ``all_gather(sum_gradients=True)``, which computes
the derivative of the sum of all ranks' losses. Gradients of parameters are summed over ranks once,
after the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.protocols import Group, ReduceOp


class AllGather(torch.autograd.Function):
    """x -> (size, *x.shape). Backward: this rank's slice of its own gradient, or of the sum of the
    gradients of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, sum_gradients: bool) -> torch.Tensor:
        ctx.group, ctx.sum_gradients = group, sum_gradients
        return gather_stacked(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.sum_gradients:
            return ReduceScatter.apply(grads[0], "sum", ctx.group)[0], None, None  # type: ignore[no-untyped-call]
        return grads[0][ctx.group.rank], None, None


class AllReduce(torch.autograd.Function):
    """Reduction over W ranks. Backward, by operation: sum: the gradient; avg: the gradient / W;
    max, min: the gradient where this rank's input is the output, 0 elsewhere; prod: the gradient
    times the product of the other ranks' inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: ReduceOp, group: Group) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        if op == "prod":
            # Not output / x, which would be wrong where x is zero.
            factors = gather_stacked(x, group)
            others = torch.cat([factors[: group.rank], factors[group.rank + 1 :]])
            ctx.save_for_backward(others.prod(0, dtype=x.dtype))
            return factors.prod(0, dtype=x.dtype)
        output = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(output, op).wait()
        if op in ("max", "min"):
            ctx.save_for_backward(x != output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.op == "avg":
            grad = grad / ctx.group.size
        elif ctx.op == "prod":
            grad = grad * ctx.saved_tensors[0].conj()
        elif ctx.op != "sum":
            grad = grad.masked_fill(ctx.saved_tensors[0], 0)
        return grad, None, None


class ReduceScatter(torch.autograd.Function):
    """(W * n, …) -> (n, …). Backward of sum: all_gather; of avg: all_gather / W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: ReduceOp, group: Group) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        output = torch.empty(
            (x.shape[0] // group.size, *x.shape[1:]), dtype=x.dtype, device=x.device
        )
        group.reduce_scatter(output.view(-1), materialized(x).view(-1), op).wait()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.op not in ("sum", "avg"):
            raise NotImplementedError(
                f"reduce_scatter with op={ctx.op!r} has no derivative here; use sum or avg."
            )
        grad = gather_stacked(grads[0], ctx.group).flatten(0, 1)
        return (grad / ctx.group.size if ctx.op == "avg" else grad), None, None


class Broadcast(torch.autograd.Function):
    """The root's tensor everywhere. Backward: the sum of all gradients on the root, zero on
    the others.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int, group: Group) -> torch.Tensor:
        ctx.root, ctx.group = root, group
        output = x.clone(memory_format=torch.contiguous_format)
        group.broadcast(output, root).wait()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(total).wait()
        return (total if ctx.group.rank == ctx.root else torch.zeros_like(total)), None, None


def gather_stacked(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return every rank's ``x``, stacked along a new dim 0, without a gradient. Collective."""
    output = torch.empty((group.size, *x.shape), dtype=x.dtype, device=x.device)
    group.all_gather(output.view(-1), materialized(x.detach()).view(-1)).wait()
    return output


def materialized(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as contiguous values; a conjugate, for example, is only marked as one."""
    return x.resolve_conj().resolve_neg().contiguous()
