"""Differentiable exchanges of queries, keys and values between the ranks along ``cp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.torch_internals import never_compiled
from bmt_cp.context_group import in_order, own_part


@never_compiled
def tokens_to_heads(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Exchange this rank's tokens with all heads, (batch, heads, tokens / W, size), for all tokens
    with its heads, (batch, heads / W, tokens, size), in order. Collective.

    An all-to-all; backward is the reverse one. Volume: (W - 1)/W of the tensors in each direction.
    """
    found: tuple[torch.Tensor, ...] = _TokensToHeads.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return found


@never_compiled
def heads_to_tokens(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The inverse of :func:`tokens_to_heads`, of one tensor. Collective."""
    found: torch.Tensor = _HeadsToTokens.apply(group, tensor)  # type: ignore[no-untyped-call]
    return found


@never_compiled
def gather_tokens(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Gather the tokens of all ranks, (batch, heads, tokens / W, size) -> (batch, heads, tokens,
    size), in order. Backward sums the gradients of all ranks, in float32 for half types, and keeps
    those of this rank's tokens. Collective.
    """
    found: tuple[torch.Tensor, ...] = _GatherTokens.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return found


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return _to_heads(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_to_tokens(grads, ctx.group)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _to_tokens([tensor], group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_to_heads(grads, ctx.group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        with annotate("to gather keys and values along cp"):
            return tuple(in_order(gather_stacked(tensor, group), 2) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        group: Group = ctx.group
        own = []
        for grad in grads:
            parts = _parts(grad, group).flatten()
            dtype = torch.promote_types(grad.dtype, torch.float32)
            total = torch.empty(parts.numel() // group.size, dtype=dtype, device=grad.device)
            with annotate("to sum gradients of keys and values along cp"):
                group.reduce_scatter(total, parts).wait()
            shape = (*grad.shape[:2], grad.shape[2] // group.size, *grad.shape[3:])
            own.append(total.view(shape).to(grad.dtype))
        return None, *own


def _to_heads(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    by_rank = [torch.stack(tensor.chunk(group.size, 1)) for tensor in tensors]
    return tuple(in_order(parts, 2) for parts in _exchanged(by_rank, group))


def _to_tokens(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    by_rank = [_parts(tensor, group) for tensor in tensors]
    return tuple(torch.cat(parts.unbind(0), 1) for parts in _exchanged(by_rank, group))


def _parts(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return every rank's tokens of ``tensor``, (ranks, batch, heads, tokens / W, size)."""
    return torch.stack([own_part(tensor, 2, group.size, rank) for rank in range(group.size)])


def _exchanged(tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Send ``tensor[r]`` of each tensor to rank r, and return what each rank sent to this one."""
    received = [torch.empty_like(tensor) for tensor in tensors]
    others = [rank for rank in range(group.size) if rank != group.rank]
    for tensor, own in zip(tensors, received, strict=True):
        own[group.rank] = tensor[group.rank]
    with annotate("to exchange tokens for heads along cp"):
        group.exchange(
            [(tensor[rank], rank) for rank in others for tensor in tensors],
            [(own[rank], rank) for rank in others for own in received],
        ).wait()
    return received
