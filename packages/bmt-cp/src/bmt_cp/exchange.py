"""Differentiable exchanges of queries, keys and values between the ranks along ``cp``.

[Note: tokens first] What is exchanged for heads lies in memory as (tokens, batch, heads, size).
There the chunks of a rank are contiguous, so that they are sent and received where they lie, and
each tensor is copied once, to divide or join its heads. Torch's attention takes and returns such
tensors, and so do layers of Hugging Face.
"""

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
    # See [Note: tokens first].
    packed, found = [], []
    for tensor in tensors:
        by_rank = torch.stack(tensor.permute(2, 0, 1, 3).chunk(group.size, 2))
        packed.append(by_rank)
        found.append(by_rank.new_empty(group.size * by_rank.shape[1], *by_rank.shape[2:]))
    _exchange([_halves(x) for x in packed], [_chunks(x, group) for x in found], group)
    return tuple(x.permute(1, 2, 0, 3) for x in found)


def _to_tokens(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    sent = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in tensors]
    received = [x.new_empty(group.size, x.shape[0] // group.size, *x.shape[1:]) for x in sent]
    _exchange([_chunks(x, group) for x in sent], [_halves(x) for x in received], group)
    return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3) for x in received)


def _parts(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return every rank's tokens of ``tensor``, (ranks, batch, heads, tokens / W, size)."""
    return torch.stack([own_part(tensor, 2, group.size, rank) for rank in range(group.size)])


_Chunks = Sequence[Sequence[torch.Tensor]]
"""For the chunk at the head and the one at the tail: what goes to or comes from each rank."""


def _chunks(by_token: torch.Tensor, group: Group) -> _Chunks:
    """Return every rank's chunks of ``by_token``, whose first dim is the tokens of the sequence."""
    chunks = by_token.chunk(2 * group.size)
    return chunks[: group.size], chunks[: group.size - 1 : -1]


def _halves(by_rank: torch.Tensor) -> _Chunks:
    """Return the chunks in ``by_rank`` (ranks, tokens / W, ...)."""
    head, tail = by_rank.chunk(2, 1)
    return head.unbind(0), tail.unbind(0)


def _exchange(sent: Sequence[_Chunks], received: Sequence[_Chunks], group: Group) -> None:
    """Send ``[r]`` of the chunks of each tensor to rank r, and receive what each rank sends to
    this one.
    """
    pairs = [
        (ours[rank], theirs[rank], rank)
        for rank in range(group.size)
        for tensor, other in zip(sent, received, strict=True)
        for ours, theirs in zip(tensor, other, strict=True)
    ]
    for ours, theirs, rank in pairs:
        if rank == group.rank:
            theirs.copy_(ours)
    with annotate("to exchange tokens for heads along cp"):
        group.exchange(
            [(ours, rank) for ours, _, rank in pairs if rank != group.rank],
            [(theirs, rank) for _, theirs, rank in pairs if rank != group.rank],
        ).wait()
